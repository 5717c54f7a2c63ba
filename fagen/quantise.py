"""`fagen.quantise`: 16-bit q, k and v → 8-bit tensors and their descales, by the kernels that a plan with `precision` begins with."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from . import driver
from .arguments import ONES, Buffers, KernelArguments
from .attention import Attention
from .compile import build
from .emit import emit
from .errors import InputError
from .interop import check, check_pointers, common_device, common_framework, stream_handle
from .interop.arrays import Array, check_layouts
from .launch import Kernel
from .library import load
from .oracle.numeric import DTYPES
from .plan.build import quantise_plan
from .plan.kernel import DESCALES, Plan, Problem, Workspace
from .plan.precision import names
from .plan.quantised import SHIFTS, idle
from .plan.rules import CHOICES, HEAD_DIMS, MAX_TILE_KV, SCALES
from .tuned import PRECISIONS
from .workspace import Use, workspaces

HALF_TYPES = ("bf16", "fp16")
INPUTS = ("q", "k", "v")


class Quantised(NamedTuple):
    """q · q_descale stands for what was q, and so k and v. Tensors are of the caller's library.

    q (batch, seqlen_q, heads, head_dim), k and v (batch, seqlen_k, kv_heads, head_dim), contiguous; v e4m3, q and k too or int8; or (precision
    "int8_qk") q and k int8 and v the tensor that was given, with v_descale None. Descales are float32: with
    granularity "tensor" (1,); "head" (batch, kv_heads) for all three; "block" (batch, heads, ⌈seqlen_q / tile_q⌉) for q,
    (batch, kv_heads, ⌈seqlen_k / tile_kv⌉) for k and v. With `hadamard` q and k are those rotated, with `smooth_k` k is without its
    mean: scores q · k are the same, in the second case but for a number of each row, which `lse_shift` (batch, heads, seqlen_q) gives
    back to lse; without `smooth_k` it is None.
    """

    q: Any
    k: Any
    v: Any
    q_descale: Any
    k_descale: Any
    v_descale: Any
    lse_shift: Any


def quantise(
    q: Any,
    k: Any,
    v: Any,
    *,
    precision: str = "fp8",
    granularity: str = "head",
    hadamard: bool = False,
    smooth_k: bool = False,
    tile_q: int | None = None,
    tile_kv: int | None = None,
    scale: float | None = None,
    stream: Any = None,
) -> Quantised:
    """Quantise attention's inputs on the GPU.

    q (batch, seqlen_q, heads, head_dim), k and v (batch, seqlen_k, kv_heads, head_dim), bf16 or fp16, of one library, with strides as
    `Kernel` takes them; head_dim 64, 128 or 256. `precision`: "fp8": all to e4m3; "int8": q and k to integers, v to e4m3;
    "int8_qk": q and k to integers, v is handed back untouched. `granularity`:
    what shares a scale, "tensor", "head" (a batch and KV head: q's heads of a group share one) or "block" of `tile_q` rows of q and `tile_kv` rows of k and v. `hadamard`: rotate q and k first, by the fixed signs of
    `fagen.plan.rotation`. `smooth_k`: take k's mean over the sequence off first. `scale`: the softmax scale, for lse_shift; None:
    head_dim ** −0.5. `stream` as for `Kernel`.

    e4m3: the largest finite |value| that shares a scale becomes 448. Values are rounded to nearest even; ±inf becomes ±448, NaN stays NaN
    (under `hadamard` the whole row, under `smooth_k` the whole head), and neither touches the scale. int8: the largest |value| becomes 127,
    values are rounded to nearest even. There is no code for NaN and ±inf: one of them among the values of a scale (rotated and smoothed)
    makes that descale NaN, so that out and lse are NaN in every row that it takes part in. Where all is 0 the scale is finite.

    Reads q, k and v twice, with "block" once (k twice under `smooth_k`). Compiles at the first call of its kind. Raises InputError naming
    the argument, LaunchError where there is no suitable GPU.
    """
    given = {"q": q, "k": k, "v": v}
    framework = common_framework(given)
    options = checked_options(granularity, hadamard, smooth_k, tile_q, tile_kv, scale, precision)
    if framework is None:
        return _quantise_numpy(given, options, stream)
    device = common_device(framework, given)
    with driver.use_device(device):
        handle = framework.stream(device) if stream is None else stream_handle(stream)
        described = {n: framework.describe(n, t, handle) for n, t in given.items()}
        arrays = {n: a for n, (a, _) in described.items()}
        kernel = _kernel(arrays, options)
        problem, strides = kernel.check(arrays)
        made = {n: framework.empty(n, shape, dtype, q) for n, (shape, dtype) in kernel.outputs(problem).items()}
        if not idle(kernel.plan, problem):
            places = {n: framework.describe(n, t, handle)[0].ptr for n, t in made.items()}
            kernel.run(device, problem, strides, {n: a.ptr for n, a in arrays.items()} | places, handle)
            framework.finish(handle)
    return _result(made, kernel.plan, v)


def _quantise_numpy(given: dict[str, Any], options: Options, stream: Any) -> Quantised:
    from .interop import host

    device = driver.current_device()
    arrays = {n: host.describe(n, t, device) for n, t in given.items()}
    kernel = _kernel(arrays, options)
    problem, strides = kernel.check(arrays)
    made = {n: np.empty(shape, DTYPES[dtype]) for n, (shape, dtype) in kernel.outputs(problem).items()}
    if not idle(kernel.plan, problem):
        handle = driver.own_stream(device) if stream is None else stream_handle(stream)
        with driver.use_device(device), host.Staging(handle) as staging:
            places = {n: staging.upload(t) for n, t in given.items()} | {n: staging.alloc(t.nbytes) for n, t in made.items()}
            kernel.run(device, problem, strides, places, handle)
            for n, t in made.items():
                staging.download(places[n], t)
    return _result(made, kernel.plan, given["v"])


# what is asked for --------------------------------------------------------------------------------------------------------


class Options(NamedTuple):
    """Checked arguments of `quantise`; precision and tile sizes as the schedule takes them."""

    granularity: str
    hadamard: bool
    smooth_k: bool
    tiles: tuple[tuple[str, int], ...]
    scale: float | None
    precision: str


def checked_options(
    granularity: Any, hadamard: Any, smooth_k: Any, tile_q: Any, tile_kv: Any, scale: Any, precision: Any = "fp8"
) -> Options:
    """InputError naming the option that is wrong."""
    if precision not in tuple(PRECISIONS):
        raise InputError("precision", f"is {precision!r}; expected {' or '.join(map(repr, PRECISIONS))}")
    kinds = [c for c in CHOICES["scale_granularity"] if c is not None]
    if granularity not in kinds:
        raise InputError("granularity", f"is {granularity!r}; expected one of {', '.join(map(repr, kinds))}")
    for name, value in (("hadamard", hadamard), ("smooth_k", smooth_k)):
        if not isinstance(value, bool):
            raise InputError(name, f"is a {type(value).__name__}; expected True or False")
    tiles = {"tile_q": tile_q, "tile_kv": tile_kv}
    for name, rows in tiles.items():
        if granularity != "block":
            if rows is not None:
                raise InputError(name, f"given with granularity {granularity!r}; it is the rows of a block")
        elif isinstance(rows, bool) or not isinstance(rows, int) or rows % 16 or not 0 < rows <= MAX_TILE_KV:
            raise InputError(name, f"is {rows!r}; granularity 'block' needs a multiple of 16 from 16 to {MAX_TILE_KV}")
    if scale is not None:
        if not smooth_k:
            raise InputError("scale", "given without smooth_k; only lse_shift depends on it")
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not SCALES[0] <= scale <= SCALES[1]:
            raise InputError("scale", f"is {scale!r}; expected a number from {SCALES[0]:g} to {SCALES[1]:g}")
    return Options(
        granularity, hadamard, smooth_k, tuple((n, r) for n, r in tiles.items() if r is not None), scale, PRECISIONS[precision]
    )


def plan_of(head_dim: int, dtype: str, options: Options) -> Plan:
    """The plan of the kernels that quantise so; InputError for a dtype or head_dim that none does."""
    if dtype not in HALF_TYPES:
        raise InputError("q", f"is {dtype}; quantised are {' and '.join(HALF_TYPES)}")
    if head_dim not in HEAD_DIMS:
        raise InputError("q", f"has head_dim {head_dim}; there are kernels for {', '.join(map(str, HEAD_DIMS))}")
    own = load("fa3_fp8", head_dim=head_dim)
    attention = Attention(head_dim=head_dim, dtype=dtype, scale=options.scale)
    schedule = own.schedule.replace(
        precision=options.precision,
        scale_granularity=options.granularity,
        hadamard=options.hadamard,
        smooth_k=options.smooth_k,
        **dict(options.tiles),
    )
    return quantise_plan(attention, schedule)


# the kernels --------------------------------------------------------------------------------------------------------------

_kernels: dict[tuple[int, str, Options], QuantiseKernel] = {}
_setup = threading.Lock()


def _kernel(arrays: Mapping[str, Array], options: Options) -> QuantiseKernel:
    q = arrays["q"]
    if len(q.shape) != 4:
        raise InputError("q", f"has {len(q.shape)} dimensions {q.shape}; expected 4: (batch, seqlen_q, heads, head_dim)")
    key = (q.shape[3], q.dtype, options)
    with _setup:
        if key not in _kernels:
            _kernels[key] = QuantiseKernel(plan_of(q.shape[3], q.dtype, options))
        return _kernels[key]


class QuantiseKernel(Kernel):
    """Compiled quantising kernels of one kind; `run` launches them for given addresses."""

    def __init__(self, plan: Plan):
        built = build(plan, emit(plan))
        super().__init__(plan, built.source.text, built.cubin, built.report)
        self._ready: dict[Any, tuple[Use, Buffers]] = {}

    def check(self, arrays: Mapping[str, Array]) -> tuple[Problem, dict[str, tuple[int, int, int]]]:
        """As of the attention kernel; InputError naming the argument."""
        problem, strides = check(self.plan.attention, arrays["q"], arrays["k"], arrays["v"], None, None)
        if problem.empty:  # to attention, but k and v may have rows
            check_layouts(arrays, False)
        return problem, strides

    def outputs(self, problem: Problem) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of what is left, as callers get it."""
        return {w.name: (caller_shape(w, problem, self.plan), w.dtype) for w in self.plan.outputs}

    def run(
        self,
        device: int,
        problem: Problem,
        strides: Mapping[str, tuple[int, int, int]],
        places: Mapping[str, int],
        stream: int,
    ) -> None:
        """Launch on the current context's stream. `places`: device addresses by name; of tensors without elements any."""
        check_pointers(**{n: p for n, p in places.items() if n in INPUTS})
        key = (device, problem, *sorted(strides.items()))
        if key not in self._ready:
            functions = self._load(device, stream)
            launch = self.plan.bind(problem, strides, driver.device_info(device).num_sms)
            names = (*INPUTS, *(w.name for w in self.plan.outputs), *(w.name for w in self.plan.workspaces))
            arguments = [KernelArguments(k, bound, names) for k, bound in zip(self.plan.kernels, launch.kernels)]
            self._ready[key] = Use(self._user, launch.workspaces), Buffers(arguments, functions)
        use, buffers = self._ready[key]
        values = tuple(places[n] for n in (*INPUTS, *(w.name for w in self.plan.outputs)))
        pool = workspaces(device)
        with pool.lock:  # which also keeps the argument buffers to one caller
            values += pool.pointers(use, stream)
            for a, ready in zip(buffers.arguments, buffers.launches):
                a.write(values, ONES)
                ready.set_stream(stream)
                (status,) = ready.queue()
                if status != 0:
                    raise ready.failure(status)


def _result(made: Mapping[str, Any], plan: Plan, v: Any) -> Quantised:
    """`v`: as it was given, where it is not quantised."""
    tensors = {t: made[n] for t, n in names(plan.attention, plan.schedule).items()}
    of_q, of_k, of_v = (made.get(n) for n in DESCALES)
    return Quantised(tensors["q"], tensors["k"], tensors.get("v", v), of_q, of_k, of_v, made.get(SHIFTS))


def caller_shape(w: Workspace, problem: Problem, plan: Plan) -> tuple[int, ...]:
    """Of an output: tensors as (batch, seq, heads, head_dim), descales and shifts without dimensions of one number."""
    env = {f: getattr(problem, f) for f in ("batch", "sq", "sk", "hq", "hkv")}
    batch, heads, rows, cols = (x.eval(env) for x in w.shape)
    if w.name in names(plan.attention, plan.schedule).values():
        return batch, rows, heads, cols
    if w.name in DESCALES and plan.schedule.scale_granularity == "tensor":
        return (1,)
    if w.name in DESCALES and plan.schedule.scale_granularity == "head":
        return batch, heads
    return batch, heads, rows


def simulate_quantise(
    q: Any,
    k: Any,
    v: Any,
    *,
    precision: str = "fp8",
    granularity: str = "head",
    hadamard: bool = False,
    smooth_k: bool = False,
    tile_q: int | None = None,
    tile_kv: int | None = None,
    scale: float | None = None,
    seed: int = 0,
) -> Quantised:
    """What `quantise` computes, step by step on the CPU: NumPy arrays (of ml_dtypes for bf16 and e4m3). `seed` as for `simulate`."""
    from .oracle.simulator import simulate_outputs

    q, k, v = (np.asarray(x) for x in (q, k, v))
    options = checked_options(granularity, hadamard, smooth_k, tile_q, tile_kv, scale, precision)
    if q.ndim != 4:
        raise InputError("q", f"has {q.ndim} dimensions; needs (batch, seqlen_q, heads, head_dim)")
    known = {dtype: name for name, dtype in DTYPES.items()}
    plan = plan_of(q.shape[3], known.get(q.dtype, str(q.dtype)), options)
    problem, spaces = simulate_outputs(plan, q, k, v, seed=seed)
    made = {}
    for w in plan.outputs:
        x = spaces[w.name]
        x = x.transpose(0, 2, 1, 3) if w.name in names(plan.attention, plan.schedule).values() else x
        made[w.name] = np.ascontiguousarray(x.astype(DTYPES[w.dtype])).reshape(caller_shape(w, problem, plan))
    return _result(made, plan, v)
