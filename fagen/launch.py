"""`Kernel`: a compiled plan that is called with tensors.

Two levels of caching keep a repeated call short (a few microseconds on the host). Everything that depends on shapes and strides
is a `BoundCall`, made once: the `Launch`, the argument buffers, the tensor-map encoders. Inside it the encoded tensor maps are kept
by address. In front of it `TorchCalls` leads from what torch tensors say of themselves to their `BoundCall`. A repeated call reads the
shapes, allocates the outputs, writes the pointers that changed and launches: no allocation of its own, no module load and no
synchronisation, so it can be captured in a CUDA graph on any stream once a first call warmed it up.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from . import descales, driver
from .arguments import ONES, TENSORS, BoundCall
from .errors import InputError, LaunchError
from .interop import Array, check, common_device, common_framework, output_shapes, stream_handle
from .plan.kernel import DESCALES, TRACE_CTAS, Plan, Problem
from .records import Records, is_own
from .torch_calls import Key, ReadyCall, Scales, TorchCalls, key_of
from .workspace import new_user, workspaces

MAX_BOUND_CALLS = 512
"""Distinct (device, sizes, strides) a kernel remembers; then the oldest go."""

Strides = dict[str, tuple[int, int, int]]


class Kernel:
    """A compiled attention kernel.

        out, lse = kernel(q, k, v)

    q (batch, seqlen_q, heads, head_dim), k (batch, seqlen_k, kv_heads, head_dim), v (batch, seqlen_k, kv_heads, head_dim_v), of the
    attention's dtype; heads is a multiple of kv_heads. Where the schedule says v_transposed, v is (batch, kv_heads, head_dim_v,
    seqlen_k). out (batch, seqlen_q, heads, head_dim_v) of the attention's output dtype;
    lse (batch, heads, seqlen_q), float32, the natural logarithm of the softmax's denominator. A row that sees no key has out 0 and
    lse −inf. No gradients are recorded.

    e4m3 and int8 only: q stands for q · q_descale, and so k, and a v of those types. A descale is a number, None (1), or a float32 array, of which the schedule's
    scale_granularity says what an element covers: "tensor": one element, in any shape. "head": (batch, kv_heads), of any strides.
    "block": q's (batch, heads, ceil(seqlen_q / tile_q)), k's and v's (batch, kv_heads, ceil(seqlen_k / tile_kv)), contiguous. A number
    (or NumPy array) must be finite, and not negative for q and k, and v's blocks. Arrays in device memory are read by the kernel, so
    nothing checks their values: those of q and k must be positive.

    All tensors belong to one library: torch, CuPy, JAX, another exporter of DLPack or __cuda_array_interface__ (which must bring
    `out` and `lse`), or NumPy (copied to the current device and back, in the call). The last dimension is contiguous; addresses and
    the other strides are multiples of 16 bytes; a stride may be 0 in q, k and v. `out` may have any such strides without overlap, and
    must not overlap the inputs; `lse` is contiguous.

    The kernel runs on the device of the tensors, on `stream` (a stream of torch, CuPy or cuda.core, or a handle) or, by default, the
    library's current one. The call returns when it is queued (JAX, NumPy: when it is done). Batch, seqlen_q or heads 0: nothing is
    launched.

    Raises InputError naming the argument, LaunchError where there is no suitable GPU or the driver refuses.
    """

    def __init__(self, plan: Plan, source: str, cubin: bytes, report: Any):
        self.plan = plan
        self.source = source
        """The CUDA text."""
        self.cubin = cubin
        self.report = report
        self._signed = {n: descales.is_signed(n, plan.schedule) for n in DESCALES}
        self._seed = 0
        self._user = new_user()
        self._setup = threading.Lock()
        self._loaded: dict[int, tuple[int, tuple[int, ...]]] = {}  # device → module, functions in the plan's order
        self._trace_first, self._trace_count = 0, TRACE_CTAS
        self._records = Records(plan)
        self._bound: dict[Any, BoundCall] = {}
        self._torch_calls = TorchCalls(MAX_BOUND_CALLS)

    def __repr__(self) -> str:
        return f"<fagen.Kernel {self.plan.id} {self.plan.attention.label} {self.plan.target.arch}>"

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        out: Any = None,
        lse: Any = None,
        stream: Any = None,
        q_descale: Any = None,
        k_descale: Any = None,
        v_descale: Any = None,
    ) -> tuple[Any, Any]:
        scales = None
        if q_descale is not None or k_descale is not None or v_descale is not None:
            scales = (q_descale, k_descale, v_descale)
        return self._torch_calls.run(q, k, v, out, lse, stream, scales) or self._call_any(q, k, v, out, lse, stream, scales)

    # the whole path, for a first call and for every library but torch --------------------------------------------------

    def _call_any(self, q: Any, k: Any, v: Any, out: Any, lse: Any, stream: Any, scales: Scales) -> tuple[Any, Any]:
        given = {n: t for n, t in (("q", q), ("k", k), ("v", v), ("out", out), ("lse", lse)) if n in "qkv" or t is not None}
        numbers = ONES
        if scales is not None:
            descales.refuse_unless_8_bit(self.plan.attention, dict(zip(DESCALES, scales)))
            found = {n: 1.0 if x is None else descales.as_number(n, x, self._signed[n]) for n, x in zip(DESCALES, scales)}
            given |= {n: x for n, x in zip(DESCALES, scales) if found[n] is None}
            numbers = tuple(1.0 if x is None else x for x in found.values())
        framework = common_framework(given)
        handle = None if stream is None else stream_handle(stream)
        if framework is None:
            return self._call_numpy(given, numbers, handle)
        device = common_device(framework, given)
        handle = framework.stream(device) if handle is None else handle
        with driver.use_device(device):
            arrays, alive = {}, []
            for name, tensor in given.items():
                arrays[name], keep = framework.describe(name, tensor, handle)
                alive.append(keep)
                if name in ("out", "lse"):
                    framework.check_output(name, tensor)
                    if arrays[name].readonly:
                        raise InputError(name, "is read-only")
            problem, strides = self._check(arrays)
            for name, shape in output_shapes(self.plan.attention, problem).items():
                if name not in given:
                    dtype = self.plan.attention.output_dtype if name == "out" else "fp32"
                    given[name] = framework.empty(name, shape, dtype, q)
                    arrays[name], keep = framework.describe(name, given[name], handle)
                    alive.append(keep)
            if not problem.empty:
                bound = self.bind(device, problem, strides, _scale_strides(arrays), handle)
                scale_pointers = tuple(arrays[n].ptr if n in arrays else 0 for n in DESCALES)
                bound.run(tuple(arrays[n].ptr for n in TENSORS), handle, scale_pointers, numbers)
                framework.finish(handle)
                if framework.name == "torch":
                    tensors = tuple(t for t in (q, k, v, out, lse) if t is not None)
                    ready = ReadyCall(sys.modules["torch"], bound, self._number, tensors)
                    self._torch_calls.remember(key_of(q, k, v, out, lse, scales), ready)
        return given["out"], given["lse"]

    def _call_numpy(self, given: dict[str, Any], numbers: tuple[float, ...], stream: int | None) -> tuple[Any, Any]:
        import numpy as np

        from .interop import host
        from .oracle.numeric import DTYPES

        arrays = {n: host.describe(n, t, 0) for n, t in given.items()}
        problem, strides = self._check(arrays)
        form_of = descales.forms(self.plan.schedule, problem)
        for name in DESCALES:
            if name in given:
                given[name] = descales.as_array(name, given[name], form_of[name])
        for name, shape in output_shapes(self.plan.attention, problem).items():
            if name in given:
                host.check_output(name, given[name])
            else:
                given[name] = np.empty(shape, DTYPES[self.plan.attention.output_dtype if name == "out" else "fp32"])
        if problem.empty:
            return given["out"], given["lse"]
        device = driver.current_device()
        stream = driver.own_stream(device) if stream is None else stream
        with driver.use_device(device), host.Staging(stream) as staging:
            bound = self.bind(device, problem, strides, _scale_strides(arrays), stream)
            pointers = [staging.upload(given[n], pad=True) for n in "qkv"] + [
                staging.alloc(given[n].nbytes) for n in ("out", "lse")
            ]
            scale_pointers = tuple(staging.upload(given[n]) if n in given else 0 for n in DESCALES)
            bound.run(tuple(pointers), stream, scale_pointers, numbers)
            staging.download(pointers[3], given["out"])
            staging.download(pointers[4], given["lse"])
        return given["out"], given["lse"]

    def _check(self, arrays: dict[str, Array]) -> tuple[Problem, Strides]:
        return check(
            self.plan.attention,
            arrays["q"],
            arrays["k"],
            arrays["v"],
            arrays.get("out"),
            arrays.get("lse"),
            v_transposed=self.plan.schedule.v_transposed,
            descales={n: arrays[n] for n in DESCALES if n in arrays},
            forms=lambda problem: descales.forms(self.plan.schedule, problem),
        )

    # what is made once -------------------------------------------------------------------------------------------------

    def ready_call(self, key: Key) -> ReadyCall | None:
        """What is remembered of the calls of a kind with torch tensors (see `torch_calls.key_of`); None before the first one."""
        return self._torch_calls.get(key)

    def bind(
        self, device: int, problem: Problem, strides: Strides, scale_strides: dict[str, tuple[int, ...]], stream: int
    ) -> BoundCall:
        """The call for these sizes and strides (over batch, seq and head, in elements; of descales that are arrays, over batch and head), to
        be run on addresses: what `__call__` does once it has read the tensors. Needs the device's context to be current."""
        key = (device, problem, *sorted(strides.items()), *sorted(scale_strides.items()))
        bound = self._bound.get(key)
        if bound is None:
            with self._setup:
                functions = self._load(device, stream)
                sms = driver.device_info(device).num_sms
                launch = self.plan.bind(problem, strides, sms, self._seed, scale_strides, self._trace_first, self._trace_count)
                pool = workspaces(device) if self._needs_pool else None
                own = self._records.addresses(device, launch)
                bound = BoundCall(self.plan, launch, device, functions, pool, own, self._user)
                while len(self._bound) >= MAX_BOUND_CALLS:
                    self._bound.pop(next(iter(self._bound))).retired = True
                self._bound[key] = bound
        return bound

    def _load(self, device: int, stream: int) -> tuple[int, ...]:
        """The kernels' handles on a device, loaded at first use. A load inside a capture would break it, so it is refused."""
        if device in self._loaded:
            return self._loaded[device][1]
        target, info = self.plan.target, driver.device_info(device)
        major, minor = target.compute_capability
        fits = (
            info.compute_capability == (major, minor)
            if target.arch.endswith("a")
            else (info.compute_capability[0] == major and info.compute_capability[1] >= minor)
        )
        if not fits:
            raise LaunchError(
                f"kernels for {target.arch} run on compute capability {major}.{minor}{'' if target.arch.endswith('a') else ' or a later minor one'}, not on {info}"
            )
        if driver.is_capturing(stream):
            raise LaunchError(
                "the first call of a kernel loads it, which a CUDA graph cannot capture: warm up first, with one call outside"
            )
        module = driver.module_load(self.cubin)
        functions = tuple(driver.module_function(module, k.name) for k in self.plan.kernels)
        for function, kernel in zip(functions, self.plan.kernels):
            driver.set_dynamic_smem(function, kernel.smem_bytes)
        self._loaded[device] = module, functions
        return functions

    def unload(self) -> None:
        """Wait for every device the kernel ran on, and give back its modules and its workspaces: the memory kept for the streams it
        ran on (kernels share it; the next call of one allocates again) and for the CUDA graphs that captured it. The next call loads
        the kernel again; those graphs must not be replayed any more, and it must not be called meanwhile."""
        with self._setup:
            self._forget_bound()
            while self._loaded:
                device, (module, _) = self._loaded.popitem()
                with driver.use_device(device):
                    driver.synchronize()
                    if self._needs_pool:
                        workspaces(device).release(self._user)
                    self._records.free(device)
                    driver.module_unload(module)

    @property
    def _needs_pool(self) -> bool:
        return not all(is_own(w.name) for w in self.plan.workspaces)

    # debug and trace builds --------------------------------------------------------------------------------------------

    @property
    def seed(self) -> int:
        """Seeds the delays after synchronisation steps in a debug build (the scalar `seed` of `Plan.bind`); other builds ignore it."""
        return self._seed

    @seed.setter
    def seed(self, value: int) -> None:
        with self._setup:
            self._seed = value
            self._forget_bound()

    def debug_record(self, device: int | None = None) -> tuple[int, ...]:
        """The 32-bit words that a debug build wrote before it trapped, on `device` (default: the only one it ran on); all 0 if it
        did not trap. They lie in host memory, so they can be read although a trap ends the context.

        LaunchError: not a debug build, or it has not run there.
        """
        if not self.plan.debug:
            raise LaunchError(f"{self!r} is not a debug build, so it keeps no debug record")
        return self._records.debug_words(device)

    @property
    def trace_first(self) -> int:
        """The first CTA that a trace build records (the scalar `trace_first` of `Plan.bind`); other builds ignore it."""
        return self._trace_first

    @trace_first.setter
    def trace_first(self, value: int) -> None:
        with self._setup:
            self._trace_first = value
            self._forget_bound()

    @property
    def trace_count(self) -> int:
        """How many CTAs of a trace build write marks (the scalar `trace_count` of `Plan.bind`); other builds ignore it. Only so many as
        have lanes of their own (the default) can be read."""
        return self._trace_count

    @trace_count.setter
    def trace_count(self, value: int) -> None:
        with self._setup:
            self._trace_count = value
            self._forget_bound()

    def trace_words(self, device: int | None = None) -> dict[str, Any]:
        """What the last launch of a trace build noted, on `device` (default: the only one it ran on): by kernel the 32-bit words of its
        buffer, a NumPy array (for `fagen.explore.trace`). Wait for the launch first.

        LaunchError: not a trace build, or it has not run there.
        """
        if not self.plan.trace:
            raise LaunchError(f"{self!r} is not a trace build, so it keeps no trace")
        where = device if device is not None else next(iter(self._loaded), driver.current_device())
        with driver.use_device(where):
            return self._records.trace_words(device)

    def _number(self, name: str, value: Any) -> float:
        """A descale that a call like this one has had as a number (or not at all)."""
        descales.refuse_unless_8_bit(self.plan.attention, {name: value})
        number = 1.0 if value is None else descales.as_number(name, value, self._signed[name])
        if number is None:
            raise InputError(name, f"is a {type(value).__name__}; expected a number or an array of q's library")
        return number

    def _forget_bound(self) -> None:
        while self._bound:
            self._bound.popitem()[1].retired = True
        self._torch_calls.clear()


def _scale_strides(arrays: dict[str, Array]) -> dict[str, tuple[int, ...]]:
    """Of the descales that are arrays, in elements."""
    return {n: arrays[n].strides for n in DESCALES if n in arrays}
