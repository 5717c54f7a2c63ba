"""Other attention kernels on this machine, through torch: cudnn, fa2, fa3, flex, triton. All optional.

A peer gets the layout it likes best, made outside the timing, and is called as its users call it (its own allocations and small
kernels included); under a CUDA graph its host overhead does not count. What a peer cannot do is said by it or here, in one line.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..attention import Attention

Call = Callable[[], Any]
"""Queues one launch on torch's current stream; returns the output as a (batch, seqlen_q, heads, head_dim_v) tensor or view."""


class PeerAbsent(Exception):
    """The peer is not installed, or does not take this attention; the message says why."""


@dataclass(frozen=True)
class Peer:
    name: str
    """On the command line."""
    title: str
    """In tables; no schedule's name looks like it."""
    make: Callable[[Any, Attention, Any, Any, Any, Mapping[str, Any]], Call]
    """(torch, attention, q, k, v, descales) → Call. q, k, v (batch, seq, heads, dim), contiguous. Raises PeerAbsent."""
    version: Callable[[Any], str | None]
    """(torch) → what identifies the kernel, None if it is not there."""


def prepare(
    name: str, torch: Any, attention: Attention, q: Any, k: Any, v: Any, descales: Mapping[str, Any] = MappingProxyType({})
) -> tuple[Call, Any]:
    """The peer's call and its first output. `descales` (of e4m3): q_descale, k_descale, v_descale, float32 (batch, kv_heads). Raises
    PeerAbsent where it is not there or refuses."""
    for feature, given in (("softcap", attention.softcap), ("window", attention.window), ("sink", attention.sink or None)):
        if given is not None:
            raise PeerAbsent(f"compared without {feature} only")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call = PEERS[name].make(torch, attention, q, k, v, descales)
        try:
            out = call()
            torch.cuda.synchronize()
        except torch.cuda.OutOfMemoryError:
            raise PeerAbsent("out of GPU memory") from None
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as e:
            raise PeerAbsent(_one_line(_why(str(e), [str(w.message) for w in caught]))) from e
    return call, out


def versions(torch: Any, names: tuple[str, ...]) -> dict[str, str]:
    """What each peer that is there would run."""
    found = {name: PEERS[name].version(torch) for name in names}
    return {name: version for name, version in found.items() if version is not None}


def _why(error: str, warned: list[str]) -> str:
    """torch's scaled_dot_product_attention only says that no kernel is available, and warns of the reasons; others say it at once."""
    if "No available kernel" in error and warned:
        return "; ".join(dict.fromkeys(w.split("(Triggered internally", 1)[0].strip() for w in warned))
    return error.strip().splitlines()[0] if error.strip() else "it refuses without a word"


def _one_line(text: str, limit: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _sdpa(torch: Any, attention: Attention, backend: str, q: Any, k: Any, v: Any) -> Call:
    """torch's scaled_dot_product_attention, kept to one backend. q, k, v (batch, heads, seq, dim), in the layout to call it with."""
    if attention.dtype == "e4m3":
        raise PeerAbsent("torch's scaled_dot_product_attention takes no e4m3")
    if attention.causal and q.shape[2] != k.shape[2]:
        raise PeerAbsent("torch aligns a causal mask top-left where seqlen_q ≠ seqlen_k; compared with equal lengths only")
    try:
        selection: Any = importlib.import_module("torch.nn.attention")
        chosen = getattr(selection.SDPBackend, backend)
    except (ImportError, AttributeError):
        raise PeerAbsent(f"torch {torch.__version__} has no backend {backend}") from None
    sdpa = torch.nn.functional.scaled_dot_product_attention
    options: dict[str, Any] = {"is_causal": attention.causal, "scale": attention.softmax_scale}
    if q.shape[1] != k.shape[1]:
        options["enable_gqa"] = True

    def call() -> Any:
        with selection.sdpa_kernel(chosen):
            return sdpa(q, k, v, **options).transpose(1, 2)

    return call


def _cudnn(torch: Any, attention: Attention, q: Any, k: Any, v: Any, descales: Mapping[str, Any]) -> Call:
    return _sdpa(torch, attention, "CUDNN_ATTENTION", *(x.transpose(1, 2).contiguous() for x in (q, k, v)))


def _fa2(torch: Any, attention: Attention, q: Any, k: Any, v: Any, descales: Mapping[str, Any]) -> Call:
    # The kernel itself reads (batch, seq, heads, dim): the transposed view reaches it without a copy.
    return _sdpa(torch, attention, "FLASH_ATTENTION", *(x.transpose(1, 2) for x in (q, k, v)))


FA3_MODULE, FA3_PACKAGE = "fa3_fwd_interface", "fa3-fwd"


def _fa3(torch: Any, attention: Attention, q: Any, k: Any, v: Any, descales: Mapping[str, Any]) -> Call:
    try:
        flash_attn_func: Any = importlib.import_module(FA3_MODULE).flash_attn_func
    except (ImportError, OSError, RuntimeError) as e:  # its extension can fail to load under another torch
        raise PeerAbsent(f"{FA3_MODULE} (wheel {FA3_PACKAGE}) cannot be imported: {_one_line(str(e))}") from None

    def call() -> Any:
        out = flash_attn_func(q, k, v, softmax_scale=attention.softmax_scale, causal=attention.causal, **descales)
        return out[0] if isinstance(out, tuple) else out

    return call


def _flex(torch: Any, attention: Attention, q: Any, k: Any, v: Any, descales: Mapping[str, Any]) -> Call:
    """torch's FlexAttention, compiled: the Triton kernel that Inductor writes for this mask. Compiled anew for every case, since Dynamo
    gives up compiling one function for more than a few shapes, and would run it uncompiled."""
    if attention.dtype == "e4m3":
        raise PeerAbsent("FlexAttention takes no e4m3")
    if importlib.util.find_spec("triton") is None:
        raise PeerAbsent("FlexAttention is compiled by triton, which is not installed")
    try:
        flex: Any = importlib.import_module("torch.nn.attention.flex_attention")
    except ImportError:
        raise PeerAbsent(f"torch {torch.__version__} has no FlexAttention") from None
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    options: dict[str, Any] = {"scale": attention.softmax_scale, "enable_gqa": q.shape[1] != k.shape[1]}
    if attention.causal:
        shift = k.shape[2] - q.shape[2]  # bottom-right
        options["block_mask"] = flex.create_block_mask(
            lambda b, h, row, key: row + shift >= key, None, None, q.shape[2], k.shape[2], device=q.device
        )
    torch.compiler.reset()
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, **options).transpose(1, 2)


FLA_MODULE, FLA_PACKAGE = "fla.ops.attn", "fla-core"


def _triton(torch: Any, attention: Attention, q: Any, k: Any, v: Any, descales: Mapping[str, Any]) -> Call:
    """The softmax attention that fla-core has in Triton. Triton itself has none in its package: the one of its tutorial is no library."""
    if attention.dtype == "e4m3":
        raise PeerAbsent(f"{FLA_PACKAGE}'s attention takes no e4m3")
    if not attention.causal or q.shape[1] != k.shape[1]:
        raise PeerAbsent(f"{FLA_PACKAGE}'s attention is causal, with equal lengths, only")
    try:
        parallel_attn: Any = importlib.import_module(FLA_MODULE).parallel_attn
    except (ImportError, OSError, RuntimeError) as e:
        raise PeerAbsent(f"{FLA_MODULE} (package {FLA_PACKAGE}) cannot be imported: {_one_line(str(e))}") from None
    return lambda: parallel_attn(q, k, v, scale=attention.softmax_scale)


def _flex_version(torch: Any) -> str | None:
    triton = _package_version("triton")
    return triton and f"torch {torch.__version__}, {triton}"


def _cudnn_version(torch: Any) -> str | None:
    number = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    if number is None:
        return None
    major, rest = divmod(number, 10000 if number >= 90000 else 1000)
    return f"cuDNN {major}.{rest // 100}.{rest % 100} in torch {torch.__version__}"


def _package_version(package: str) -> str | None:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return None


PEERS = {
    p.name: p
    for p in (
        Peer("cudnn", "cudnn (torch)", _cudnn, _cudnn_version),
        Peer("fa2", "fa2 (torch)", _fa2, lambda torch: f"torch {torch.__version__}"),
        Peer("fa3", f"fa3 ({FA3_PACKAGE})", _fa3, lambda torch: _package_version(FA3_PACKAGE)),
        Peer("flex", "flex (torch)", _flex, _flex_version),
        Peer("triton", f"triton ({FLA_PACKAGE})", _triton, lambda torch: _package_version(FLA_PACKAGE)),
    )
}
