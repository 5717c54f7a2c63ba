"""benchmarks/model_tensors.py on a model made up here: what it writes is what attention of that model gets."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fagen import Attention, npz
from fagen.oracle import reference

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "model_tensors.py"
HIDDEN, HEADS, LAYERS = 64, 2, 2


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("model_tensors", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def model(tmp_path: Path, script: Any) -> Path:
    """A tiny BERT with random weights, in the package's files."""
    rng = np.random.default_rng(0)
    words = ["[PAD]", *(f"[unused{i}]" for i in range(99)), "[UNK]", "[CLS]", "[SEP]", "the", "cat", "##s", "sat", ".", "mat"]
    dims: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (len(words), HIDDEN),
        "embeddings.position_embeddings.weight": (script.LENGTH, HIDDEN),
        "embeddings.token_type_embeddings.weight": (2, HIDDEN),
    }
    norms = ["embeddings.LayerNorm"]
    for n in range(LAYERS):
        at = f"encoder.layer.{n}."
        norms += [f"{at}attention.output.LayerNorm", f"{at}output.LayerNorm"]
        dense = {f"attention.self.{x}": (HIDDEN, HIDDEN) for x in ("query", "key", "value")}
        dense |= {"attention.output.dense": (HIDDEN, HIDDEN), "intermediate.dense": (128, HIDDEN), "output.dense": (HIDDEN, 128)}
        for name, shape in dense.items():
            dims |= {f"{at}{name}.weight": shape, f"{at}{name}.bias": shape[:1]}
    for name in norms:
        dims |= {f"{name}.weight": (HIDDEN,), f"{name}.bias": (HIDDEN,)}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, shape in dims.items():
        x = (rng.standard_normal(shape) * 0.2).astype("<f4")
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [len(data), len(data) + x.nbytes]}
        data += x.tobytes()
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    config = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "layer_norm_eps": 1e-12}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "README.md").write_text("The cats sat. " * 300)
    return tmp_path


def run(script: Any, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["model_tensors.py", *map(str, arguments)])
    code: int = script.main()
    return code


def test_words_become_the_longest_pieces(script: Any, model: Path) -> None:
    vocab = script.vocabulary(model / "vocab.txt")
    names = {i: w for w, i in vocab.items()}
    found = [names[i] for i in script.wordpieces("The CATS sät. dog", vocab)]
    assert found == ["the", "cat", "##s", "sat", ".", "[UNK]"]


def test_the_padded_heads_are_attention_of_the_model(script: Any, model: Path, tmp_path: Path) -> None:
    """Every layer's own attention, from what is yielded, gives what the next layer starts from."""
    weights, config = script.tensors(model / "model.safetensors"), json.loads((model / "config.json").read_text())
    tokens = script.sequences(script.wordpieces((model / "README.md").read_text(), script.vocabulary(model / "vocab.txt")))
    assert len(tokens) == 1500 // 510 and {len(t) for t in tokens} == {512} and tokens[0][:2] == [101, 103]
    first, second = script.forward(weights, config, tokens)
    assert first[0].shape == (len(tokens), 512, HEADS, 64) and not first[0][..., 32:].any()
    out, _ = reference(Attention(head_dim=64, scale=32**-0.5), *first)
    ids = np.array(tokens)
    x = weights["embeddings.word_embeddings.weight"][ids] + weights["embeddings.position_embeddings.weight"]
    x = script._norm(x + weights["embeddings.token_type_embeddings.weight"][0], weights, "embeddings.LayerNorm", 1e-12)
    at = "encoder.layer.0."
    o = out[..., :32].reshape(x.shape).astype(np.float32)
    x = script._norm(
        x + script._dense(o, weights, f"{at}attention.output.dense"), weights, f"{at}attention.output.LayerNorm", 1e-12
    )
    inner = script._dense(x, weights, f"{at}intermediate.dense")
    inner = inner * 0.5 * (1 + script._erf(inner / 2**0.5))
    x = script._norm(x + script._dense(inner, weights, f"{at}output.dense"), weights, f"{at}output.LayerNorm", 1e-12)
    query = script._dense(x, weights, "encoder.layer.1.attention.self.query").reshape(len(tokens), 512, HEADS, 32)
    np.testing.assert_allclose(second[0][..., :32], query, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_what_is_written(
    dtype: str, script: Any, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = model / "qkv.npz"
    assert run(script, monkeypatch, model, target, "--dtype", dtype) == 0
    assert f"--set head_dim=64 --set scale={32**-0.5!r}" in capsys.readouterr().out
    arrays = npz.read(target, ("q", "k", "v"))
    assert all(x.shape == (2 * LAYERS, 512, HEADS, 64) for x in arrays.values())
    assert arrays["q"].dtype.name == {"bf16": "bfloat16", "fp16": "float16"}[dtype]


@pytest.mark.parametrize(
    ("missing", "message"), [("config.json", "config.json: cannot be read"), ("model.safetensors", "cannot be read")]
)
def test_what_is_missing_is_named(
    missing: str, message: str, script: Any, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / missing).unlink()
    assert run(script, monkeypatch, model, model / "qkv.npz") == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line


def test_another_model_is_refused(
    script: Any, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "config.json").write_text("{}")
    assert run(script, monkeypatch, model, model / "qkv.npz") == 2
    assert "is no BERT as this script reads it: KeyError('num_attention_heads')" in capsys.readouterr().err


def test_a_short_text_is_refused(
    script: Any, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "short.txt").write_text("The cat.")
    assert run(script, monkeypatch, model, model / "qkv.npz", "--text", model / "short.txt") == 2
    assert "--text: has 3 tokens; needs 510" in capsys.readouterr().err
