"""`fagen.attention`: the call that picks its own schedule.

A call with torch tensors of a kind met before goes the short way of `torch_calls`, as a kernel's own calls do. Others look up a kernel
by their shapes and types; if there is none, the arguments are described and checked in full, `tuned.choose` picks the schedule, and the
kernel of that (attention, schedule) is compiled through the disk cache or taken from memory. Kernels stay in memory until the process
ends, one for each (attention, schedule) met, since a CUDA graph may have captured any of them; only `scale` lets their number grow.
Their workspaces do not add up: kernels share them, one per stream.
"""

from __future__ import annotations

import math
import numbers
import sys
import threading
from collections.abc import Hashable
from typing import Any

from . import api, driver, tuned
from .attention import Attention
from .errors import InputError
from .interop import Array, check, common_device, common_framework, framework_of, stream_handle
from .launch import Kernel
from .plan.rules import CHOICES, HEAD_DIMS, SCALES
from .schedule import Schedule
from .torch_calls import Key, TorchCalls, key_of
from .workspace import SINK_BYTES, sink

MAX_CALLS = 4096
"""Kinds of call (shapes, types, device, options) that lead straight to their kernel; then the oldest go."""

MAX_TORCH_CALLS = 512
"""Kinds of call with torch tensors, for each of the `Options`, that are launched straight away; then the oldest go."""

PRECISION_NAMES = tuple(tuned.PRECISIONS)

Options = tuple[bool, float | None, str | None]
"""causal, scale, precision."""

_torch_calls: dict[Options, TorchCalls] = {}
_calls: dict[Hashable, Kernel] = {}
_kernels: dict[tuple[Attention, Schedule], Kernel] = {}
_setup = threading.Lock()


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    precision: str | None = None,
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
    stream: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
) -> Any:
    """softmax(scale · Q Kᵀ + mask) V with the schedule that `fagen.tuned.choose` picks for these sizes on the tensors' device.

    q (batch, seqlen_q, heads, head_dim), k and v (batch, seqlen_k, kv_heads, head_dim), of torch, CuPy, JAX, another exporter of
    DLPack, or NumPy, with strides as `Kernel` takes them; bf16, fp16 or e4m3, or q and k int8 and v e4m3, bf16 or fp16; head_dim 64, 128
    or 256; heads a multiple of kv_heads.
    `causal`: row i sees key j if j ≤ i + seqlen_k − seqlen_q. `scale`: None is head_dim ** −0.5; it is a constant of a 16-bit kernel,
    so every other value compiles one of its own. `precision`: "fp8" computes the products in e4m3, "int8" the scores of 8-bit integers and
    P·V in e4m3, with about 0.7 of fp8's error at the same work, "int8_qk" the scores of 8-bit integers and P·V in v's own 16-bit type;
    16-bit tensors (with "int8_qk" q and k alone) are then quantised first (rotated, one scale for each batch and KV head), by kernels of the
    same plan (NaN and infinities: as `fagen.quantise` says); 8-bit tensors are computed as they are, and take no other precision. `out`,
    `lse`, `stream` and the descales (8-bit tensors only) as for `Kernel`, whose scale_granularity is that of the schedule picked: "head", unless the
    table says otherwise.

    Returns out (batch, seqlen_q, heads, head_dim), of v's dtype (where that is 8-bit: bf16; with q in 8 bits the type of a given `out`); with `return_lse` the pair
    (out, lse), lse (batch, heads, seqlen_q) in float32, the natural logarithm. No gradients are recorded.

    The first call that needs a kernel compiles it (seconds; from the disk cache milliseconds) and loads it on the device. So to capture
    calls in a CUDA graph, call once before with the same shapes, types and options. Later calls take what those of a `Kernel` take, and
    of torch tensors without `return_lse` and `lse` they allocate `out` alone: 4 MiB are kept on each device for the lse.

    Raises InputError naming the argument, LaunchError where there is no GPU or none that a schedule is for, CompileError where there is
    no compiler and no cached kernel.
    """
    scales = None
    if q_descale is not None or k_descale is not None or v_descale is not None:
        scales = (q_descale, k_descale, v_descale)
    usual = (causal is True or causal is False) and (
        precision is None or precision in PRECISION_NAMES
    )  # 1 and True are one key, but not one call
    plain = usual and (scale is None or type(scale) is float)
    if plain:
        calls = _torch_calls.get((causal, scale, precision))
        done = None if calls is None else calls.run(q, k, v, out, lse, stream, scales, return_lse)
        if done is not None:
            return done if return_lse else done[0]
    kernel = _found(q, k, v, causal, scale, precision, out, lse, stream)
    result = kernel(q, k, v, out, lse, stream, *(scales or ()))
    torch = sys.modules.get("torch")
    if plain and torch is not None and isinstance(q, torch.Tensor):
        _remember_torch(kernel, (causal, scale, precision), key_of(q, k, v, out, lse, scales), stream)
    return result if return_lse else result[0]


def _remember_torch(kernel: Kernel, options: Options, key: Key, stream: Any) -> None:
    """Let calls like the one that the kernel just had go straight to it."""
    ready = kernel.ready_call(key)
    if ready is None:  # nothing was launched
        return
    if 4 * math.prod(ready.lse_shape) <= SINK_BYTES:
        ready.lse_sink = sink(ready.device, ready.current_stream(ready.device) if stream is None else stream_handle(stream))
        if not ready.lse_sink:
            return  # captured: the next call may be outside
    with _setup:
        _torch_calls.setdefault(options, TorchCalls(MAX_TORCH_CALLS)).remember(key, ready)


def _found(q: Any, k: Any, v: Any, causal: bool, scale: Any, precision: Any, out: Any, lse: Any, stream: Any) -> Kernel:
    """The kernel for a call: one looked up by its shapes and types, else by all of it."""
    torch = sys.modules.get("torch")
    kernel = key = None
    try:
        device = q.get_device() if torch is not None and isinstance(q, torch.Tensor) else _device(q)
        key = (
            q.shape,
            k.shape,
            q.dtype,
            v.dtype,
            device,
            causal,
            scale,
            type(causal),
            type(scale),
            None if out is None else out.dtype,
            precision,
        )
        kernel = _calls.get(key)
    except (AttributeError, TypeError):  # an exporter of DLPack and no more, or what is no tensor: described below
        key = None
    return _kernel(q, k, v, causal, scale, precision, out, lse, stream, key) if kernel is None else kernel


def _device(q: Any) -> int:
    framework = framework_of("q", q)
    return driver.current_device() if framework is None else framework.device("q", q)


def _kernel(
    q: Any, k: Any, v: Any, causal: bool, scale: Any, precision: Any, out: Any, lse: Any, stream: Any, key: Hashable | None
) -> Kernel:
    """The kernel for a call, which is then remembered under `key`. Everything is checked before anything is compiled."""
    if precision not in (None, *PRECISION_NAMES):
        raise InputError("precision", f"is {precision!r}; expected None, {' or '.join(map(repr, PRECISION_NAMES))}")
    given = {n: t for n, t in (("q", q), ("k", k), ("v", v), ("out", out), ("lse", lse)) if n in "qkv" or t is not None}
    arrays = _described(given, stream)
    wanted = _attention(arrays, causal, scale)
    if precision is not None and wanted.has_descales and tuned.PRECISIONS[precision] != wanted.products:
        v = f" and v {wanted.value_dtype}" if wanted.dtype == "int8" else ""
        raise InputError("precision", f"is {precision!r}, but q is {wanted.dtype}{v}: quantised tensors are computed as they are")
    problem, _ = check(wanted, arrays["q"], arrays["k"], arrays["v"], arrays.get("out"), arrays.get("lse"))
    device = driver.device_info(arrays["q"].device)
    if precision is None or wanted.has_descales:
        schedule = tuned.choose(wanted, problem, device).schedule
    else:
        schedule = tuned.choose_quantised(wanted, problem, device, precision=tuned.PRECISIONS[precision]).schedule
    with _setup:
        kernel = _kernels.get((wanted, schedule))
        if kernel is None:
            kernel = _kernels[wanted, schedule] = api.compile(wanted, schedule)
        if key is not None:
            while len(_calls) >= MAX_CALLS:
                _calls.pop(next(iter(_calls)))
            _calls[key] = kernel
    return kernel


def _described(given: dict[str, Any], stream: Any) -> dict[str, Array]:
    """The arguments as arrays, of one library and on one device."""
    framework = common_framework(given)
    if framework is None:
        from .interop import host

        return {n: host.describe(n, t, driver.current_device()) for n, t in given.items()}
    device = common_device(framework, given)
    with driver.use_device(device):
        handle = framework.stream(device) if stream is None else stream_handle(stream)
        return {n: framework.describe(n, t, handle)[0] for n, t in given.items()}


def _attention(arrays: dict[str, Array], causal: bool, scale: Any) -> Attention:
    """What is computed, as far as q and the options tell; InputError naming what no kernel takes."""
    if not isinstance(causal, bool):
        raise InputError("causal", f"is a {type(causal).__name__}; expected True or False")
    q = arrays["q"]
    if len(q.shape) != 4:
        raise InputError("q", f"has {len(q.shape)} dimensions {q.shape}; expected 4: (batch, seqlen_q, heads, head_dim)")
    if q.dtype not in CHOICES["dtype"]:
        raise InputError("q", f"is {q.dtype}; there are kernels for {', '.join(map(str, CHOICES['dtype']))}")
    head_dim = q.shape[3]
    if head_dim not in HEAD_DIMS:
        raise InputError("q", f"has head_dim {head_dim}; there are kernels for {', '.join(map(str, HEAD_DIMS))}")
    out, v = arrays.get("out"), arrays["v"]
    plain = Attention(
        head_dim=head_dim,
        dtype=q.dtype,
        v_dtype=v.dtype if q.dtype == "int8" and v.dtype in tuned.HALF_TYPES else None,
        mask="causal" if causal else "full",
        scale=_scale(scale, head_dim),
    )
    other = plain.has_descales and out is not None and out.dtype in tuned.HALF_TYPES and out.dtype != plain.output_dtype
    return plain.replace(out_dtype=out.dtype) if other and out is not None else plain


def _scale(scale: Any, head_dim: int) -> float | None:
    """None for the usual one, however it is given: one kernel serves both."""
    if scale is None:
        return None
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):  # a tensor's value may change from call to call
        raise InputError("scale", f"is a {type(scale).__name__}; expected a number")
    try:
        number = float(scale)
    except OverflowError:  # an int beyond float64
        number = math.inf
    if not SCALES[0] <= number <= SCALES[1]:
        raise InputError("scale", f"is {number}; expected a number from {SCALES[0]:g} to {SCALES[1]:g}")
    return None if number == head_dim**-0.5 else number
