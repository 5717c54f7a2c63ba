"""`Kernel`: a compiled plan that is called with tensors.

Two levels of caching keep a repeated call short (a few microseconds on the host). Everything that depends on shapes and strides
is a `BoundCall`, made once: the `Launch`, the argument buffers, the tensor-map encoders. Inside it the encoded tensor maps are kept
by address. A repeated call reads the shapes, allocates the outputs, writes the pointers and launches: no allocation of its own, no
module load and no synchronisation, so it can be captured in a CUDA graph on any stream once a first call warmed it up.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any

from . import descales, driver
from .arguments import ONES, TENSORS, BoundCall
from .errors import InputError, InternalError, LaunchError
from .interop import Array, check, framework_of, output_shapes, stream_handle
from .interop.arrays import FRAMEWORK_NAMES
from .interop.pytorch import raw_stream
from .plan.kernel import DESCALES, Launch, Plan, Problem
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

    e4m3 only: q stands for q · q_descale, and so k and v. A descale is a number, None (1), or a float32 array, of which the schedule's
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
        self._debug: dict[int, tuple[int, int, int]] = {}  # device → host address, device address, bytes
        self._bound: dict[Any, BoundCall] = {}
        self._torch_calls: dict[Any, BoundCall] = {}
        self._torch_stream: Any = None
        self._torch_out_dtype: Any = None

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
            descales.refuse_unless_8_bit(self.plan.attention, dict(zip(DESCALES, scales)))
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(q, torch.Tensor):
            return self._call_any(q, k, v, out, lse, stream, scales)
        try:
            key = (
                (
                    q.shape,
                    q.stride(),
                    q.dtype,
                    q.device,
                    k.shape,
                    k.stride(),
                    k.dtype,
                    k.device,
                    v.shape,
                    v.stride(),
                    v.dtype,
                    v.device,
                ),
                None if out is None else (out.shape, out.stride(), out.dtype, out.device),
                None if lse is None else (lse.shape, lse.stride(), lse.dtype, lse.device),
                scales and tuple((x.shape, x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor) else None for x in scales),
            )
            bound = self._torch_calls.get(key)
        except (AttributeError, TypeError, RuntimeError):  # not all torch tensors, or one without strides
            return self._call_any(q, k, v, out, lse, stream, scales)
        if bound is None:  # the first call of its kind checks everything
            return self._call_any(q, k, v, out, lse, stream, scales, key)
        if out is None:
            out = torch.empty(bound.out_shape, dtype=self._torch_out_dtype, device=q.device)
        if lse is None:
            lse = torch.empty(bound.lse_shape, dtype=torch.float32, device=q.device)
        handle = self._torch_stream(bound.device) if stream is None else stream_handle(stream)
        addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr())
        if scales is None:
            bound.run(addresses, handle)
        else:
            arrays = tuple(x.data_ptr() if isinstance(x, torch.Tensor) else 0 for x in scales)
            bound.run(
                addresses, handle, arrays, tuple(1.0 if a else self._number(n, x) for n, x, a in zip(DESCALES, scales, arrays))
            )
        return out, lse

    # the whole path, for a first call and for every library but torch --------------------------------------------------

    def _call_any(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, stream: Any, scales: tuple[Any, ...] | None, torch_key: Any = None
    ) -> tuple[Any, Any]:
        given = {n: t for n, t in (("q", q), ("k", k), ("v", v), ("out", out), ("lse", lse)) if n in "qkv" or t is not None}
        numbers = ONES
        if scales is not None:
            found = {n: 1.0 if x is None else descales.as_number(n, x, self._signed[n]) for n, x in zip(DESCALES, scales)}
            given |= {n: x for n, x in zip(DESCALES, scales) if found[n] is None}
            numbers = tuple(1.0 if x is None else x for x in found.values())
        frameworks = {n: framework_of(n, t) for n, t in given.items()}
        framework = frameworks["q"]
        for name, other in frameworks.items():
            mine, its = (f.name if f else "NumPy" for f in (framework, other))
            if mine != its:
                raise InputError(name, f"is a {its} array, q a {mine} one; all must belong to one library")
        handle = None if stream is None else stream_handle(stream)
        if framework is None:
            return self._call_numpy(given, numbers, handle)
        devices = {n: framework.device(n, t) for n, t in given.items()}
        device = devices["q"]
        for name, other_device in devices.items():
            if other_device != device:
                raise InputError(name, f"is on cuda:{other_device}, q on cuda:{device}")
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
                bound = self._bind(device, problem, strides, _scale_strides(arrays), handle)
                scale_pointers = tuple(arrays[n].ptr if n in arrays else 0 for n in DESCALES)
                bound.run(tuple(arrays[n].ptr for n in TENSORS), handle, scale_pointers, numbers)
                framework.finish(handle)
                if torch_key is not None:
                    self._remember_torch(torch_key, bound)
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
            bound = self._bind(device, problem, strides, _scale_strides(arrays), stream)
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

    def _remember_torch(self, key: Any, bound: BoundCall) -> None:
        torch = sys.modules["torch"]
        self._torch_stream = raw_stream(torch)
        self._torch_out_dtype = getattr(torch, FRAMEWORK_NAMES[self.plan.attention.output_dtype])
        with self._setup:
            _bounded_insert(self._torch_calls, key, bound)

    def _bind(
        self, device: int, problem: Problem, strides: Strides, scale_strides: dict[str, tuple[int, ...]], stream: int
    ) -> BoundCall:
        """The bound call for these sizes and strides. Needs the device's context to be current."""
        key = (device, problem, *sorted(strides.items()), *sorted(scale_strides.items()))
        bound = self._bound.get(key)
        if bound is None:
            with self._setup:
                functions = self._load(device, stream)
                launch = self.plan.bind(problem, strides, driver.device_info(device).num_sms, self._seed, scale_strides)
                needs_pool = any(name != "debug" for name, _, _ in launch.workspaces)
                debug = self._debug_address(device, launch) if self.plan.debug else 0
                bound = BoundCall(
                    self.plan, launch, device, functions, workspaces(device) if needs_pool else None, debug, self._user
                )
                _bounded_insert(self._bound, key, bound)
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
            needs_pool = any(w.name != "debug" for w in self.plan.workspaces)
            self._forget_bound()
            while self._loaded:
                device, (module, _) = self._loaded.popitem()
                with driver.use_device(device):
                    driver.synchronize()
                    if needs_pool:
                        workspaces(device).release(self._user)
                    driver.module_unload(module)

    # debug builds ------------------------------------------------------------------------------------------------------

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
        if device is None and len(self._debug) == 1:
            (device,) = self._debug
        if device not in self._debug:
            raise LaunchError(f"{self!r} has debug records of the devices {sorted(self._debug)}, not of {device}")
        host, _, nbytes = self._debug[device]
        return tuple((ctypes.c_uint32 * (nbytes // 4)).from_address(host))

    def _debug_address(self, device: int, launch: Launch) -> int:
        """Device address of the record on a device, made at first use."""
        nbytes = sum(size for name, size, _ in launch.workspaces if name == "debug")
        if device not in self._debug:
            host, address = driver.host_alloc(nbytes)
            ctypes.memset(host, 0, nbytes)
            self._debug[device] = host, address, nbytes
        _, address, room = self._debug[device]
        if room < nbytes:
            raise InternalError(f"the debug record grew from {room} to {nbytes} bytes; its size must not depend on the call")
        return address

    def _number(self, name: str, value: Any) -> float:
        """A descale that a call like this one has had as a number (or not at all)."""
        number = 1.0 if value is None else descales.as_number(name, value, self._signed[name])
        if number is None:
            raise InputError(name, f"is a {type(value).__name__}; expected a number or an array of q's library")
        return number

    def _forget_bound(self) -> None:
        self._bound.clear()
        self._torch_calls.clear()


def _scale_strides(arrays: dict[str, Array]) -> dict[str, tuple[int, ...]]:
    """Of the descales that are arrays, in elements."""
    return {n: arrays[n].strides for n in DESCALES if n in arrays}


def _bounded_insert(calls: dict[Any, BoundCall], key: Any, bound: BoundCall) -> None:
    while len(calls) >= MAX_BOUND_CALLS:
        calls.pop(next(iter(calls)), None)
    calls[key] = bound
