"""Launching, followed to the last byte on a driver made of host memory (fake_cuda.py)."""

from __future__ import annotations

import ctypes
import os
import pickle
import subprocess
import sys
import threading
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from fake_cuda import (
    Device,
    FakeCuda,
    Tensor,
    attention_kernel,
    device_array,
    fake_torch,
    install,
    params_struct,
    read_arguments,
)
from fp8_steps import PAPER_FP8

import fagen
from fagen import InputError, InternalError, LaunchError, driver
from fagen.arguments import BoundCall, KernelArguments
from fagen.launch import Kernel
from fagen.library import load
from fagen.plan import Plan, Problem, assemble
from fagen.plan.expr import as_expr, sym
from fagen.plan.kernel import KernelLaunch, Param, Workspace
from fagen.plan.steps import Gmem
from fagen.workspace import SLOT_BYTES, SLOTS

BF16 = ml_dtypes.bfloat16
STREAM = 0x70  # torch's current one


def schedule_plan(name: str = "fa3", head_dim: int = 64, dtype: str = "bf16", **knobs: object) -> Plan:
    """Without a workspace unless the knobs ask for one."""
    static = {"parallelism": "persistent_static"} if name == "fa3" else {}
    attention, schedule = load(name, head_dim=head_dim, dtype=dtype, **{**static, **knobs})
    return assemble(attention, schedule)  # the proof has its own tests


def with_workspace(p: Plan, nbytes: int, zeroed: bool = True) -> Plan:
    """The plan, its kernel taking one more workspace by pointer."""
    kernel = p.kernels[0]
    kernel = replace(
        kernel, gmem=(*kernel.gmem, Gmem("scratch", "i32", ("n",), "workspace")), pointers=(*kernel.pointers, "scratch")
    )
    return replace(p, kernels=(kernel,), workspaces=(*p.workspaces, Workspace("scratch", "i32", as_expr(nbytes // 4), zeroed)))


def random(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(BF16)


def qkv(batch=2, sq=5, sk=7, hq=4, hkv=2, d=64):
    rng = np.random.default_rng(0)
    return random(rng, batch, sq, hq, d), random(rng, batch, sk, hkv, d), random(rng, batch, sk, hkv, d)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch):
    return fake_torch(monkeypatch, STREAM)


def make(p: Plan, fake: FakeCuda) -> Kernel:
    fake.kernel = attention_kernel(p) if len(p.kernels[0].pointers) <= 5 else None
    return Kernel(p, "// text", b"cubin", None)


# struct Params -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scalars",
    [
        (),
        ("i64", "i32"),
        ("i64", "i64", "i32", "i32", "i32"),
        ("i32",),
        ("i64", "f32", "f32", "i32"),
        ("i64", "i32", "divisor", "f32", "divisor"),
    ],
)
@pytest.mark.parametrize("pointers", [(), ("out",), ("q", "lse", "out"), ("lse", "v", "k", "q", "out")])
def test_params_are_laid_out_as_c_does(scalars: tuple[str, ...], pointers: tuple[str, ...]) -> None:
    names = ("q", "k", "v", "out", "lse")
    floats = iter(("q_descale_value", "v_descale_value"))
    params = tuple(Param(next(floats) if c == "f32" else f"s{i}", c, sym("sq")) for i, c in enumerate(scalars))
    divisors = tuple(c == "divisor" for c in scalars)
    kernel = replace(schedule_plan("fa2").kernels[0], pointers=pointers, params=params)
    values = tuple((i + 3) * 1000 if by else -(i + 3) * 1000 for i, by in enumerate(divisors))
    arguments = KernelArguments(kernel, KernelLaunch(kernel.name, 1, 128, 0, values, ()), names)
    arguments.write((11, 22, 33, 44, 2**63 + 5))
    _, seen = read_arguments(kernel, arguments.params)
    assert [getattr(seen, n) for n in pointers] == [dict(zip(names, (11, 22, 33, 44, 2**63 + 5)))[n] for n in pointers]
    members = [getattr(seen, p.name) for p in params]
    assert [10**9 // m.quotient(10**9) if by else m for m, by in zip(members, divisors)] == list(values)
    assert arguments._memory.nbytes >= 128 * len(kernel.maps) + ctypes.sizeof(params_struct(kernel))


def test_params_out_of_order_or_without_a_value_are_our_fault() -> None:
    kernel = schedule_plan().kernels[0]
    launch = KernelLaunch(kernel.name, 1, 128, 0, (1, 2), ())
    swapped = replace(kernel, params=(Param("a", "i32", sym("sq")), Param("b", "i64", sym("sq"))))
    with pytest.raises(InternalError, match=r"i64 parameters must stand before"):
        KernelArguments(swapped, launch, ("out", "lse"))
    with pytest.raises(InternalError, match=r"scratch"):
        KernelArguments(replace(kernel, pointers=("scratch",)), launch, ("out", "lse"))


# the whole path ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fa2", "fa3"])
def test_numpy_goes_to_the_device_and_back(name: str, fake: FakeCuda) -> None:
    p = schedule_plan(name)
    q, k, v = qkv()
    out, lse = make(p, fake)(q, k, v)
    want, want_lse = fagen_reference(q, k, v)
    assert out.dtype == BF16 and lse.dtype == np.float32
    np.testing.assert_allclose(out.astype(np.float32), want, atol=0.02)
    np.testing.assert_allclose(lse, want_lse, atol=1e-4)
    assert fake.launches[0].stream == driver.own_stream(0)
    assert not fake.contexts, "the caller's context is back"
    assert not fake.memory, "the copies are freed"


def fagen_reference(q, k, v):
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    s = np.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    e = np.exp(s - s.max(-1, keepdims=True))
    lse = s.max(-1) + np.log(e.sum(-1))
    return np.einsum("bhij,bjhd->bihd", e / e.sum(-1, keepdims=True), v), lse


def test_numpy_writes_into_given_arrays_of_any_strides(fake: FakeCuda) -> None:
    q, k, v = qkv()
    kernel = make(schedule_plan(), fake)
    want, want_lse = kernel(q, k, v)
    wide = np.full((2, 5, 4, 128), 7, BF16)
    _out, lse = kernel(q[:, ::-1], k, v, out=wide[:, ::-1, :, ::2], lse=np.zeros((2, 4, 5), np.float32))
    np.testing.assert_array_equal(wide[..., ::2], want)
    np.testing.assert_array_equal(wide[..., 1::2], np.full_like(want, 7))
    np.testing.assert_array_equal(lse[:, :, ::-1], want_lse)


VIEWS = {
    "fused": lambda r: tuple(r.standard_normal((2, 6, 3, 2, 64)).astype(BF16)[:, :, i] for i in range(3)),
    "transposed": lambda r: tuple(r.standard_normal((2, 2, 6, 64)).astype(BF16).transpose(0, 2, 1, 3) for _ in range(3)),
    "every second key": lambda r: (random(r, 2, 6, 2, 64), random(r, 2, 12, 2, 64)[:, ::2], random(r, 2, 6, 2, 64)),
    "heads broadcast": lambda r: (
        random(r, 2, 6, 2, 64),
        np.broadcast_to(random(r, 2, 6, 1, 64), (2, 6, 2, 64)),
        random(r, 2, 6, 2, 64),
    ),
    "batch 1 with stride 0": lambda r: tuple(np.broadcast_to(random(r, 6, 2, 64), (1, 6, 2, 64)) for _ in range(3)),
    "batch 1 with an odd stride": lambda r: tuple(
        np.lib.stride_tricks.as_strided(x, x.shape, (6, *x.strides[1:])) for x in (random(r, 1, 6, 2, 64) for _ in range(3))
    ),
}


@pytest.mark.parametrize("name", ["fa2", "fa3"])
@pytest.mark.parametrize("view", VIEWS)
def test_views_equal_contiguous_copies_on_the_first_and_the_second_call(view: str, name: str, fake: FakeCuda, torch) -> None:
    views = VIEWS[view](np.random.default_rng(1))
    kernel = make(schedule_plan(name), fake)
    want, want_lse = kernel(*(Tensor(np.ascontiguousarray(x)) for x in views))
    for _ in range(2):
        out, lse = kernel(*(Tensor(x) for x in views))
        np.testing.assert_array_equal(out.array, want.array)
        np.testing.assert_array_equal(lse.array, want_lse.array)


def test_a_strided_out_is_written_in_place_and_its_gaps_stay(fake: FakeCuda, torch) -> None:
    tensors = [Tensor(x) for x in qkv()]
    kernel = make(schedule_plan(), fake)
    want, _ = kernel(*tensors)
    wide = np.full((2, 5, 6, 64), 7, BF16)
    for _ in range(2):
        out = Tensor(wide[:, :, 1:5])
        got, _ = kernel(*tensors, out=out)
        assert got is out
        np.testing.assert_array_equal(wide[:, :, 1:5], want.array)
        assert (wide[:, :, [0, 5]] == 7).all()


def test_zero_keys_launch_and_zero_queries_do_not(fake: FakeCuda, torch) -> None:
    kernel = make(schedule_plan(), fake)
    for _ in range(2):
        out, lse = kernel(*(Tensor(x) for x in qkv(sk=0)))
        assert (out.array == 0).all() and (lse.array == -np.inf).all()
    assert len(fake.launches) == 2
    for sizes in ({"batch": 0}, {"sq": 0}, {"hq": 0, "hkv": 0}):
        q, k, v = qkv(**sizes)
        out, lse = kernel(Tensor(q), Tensor(k), Tensor(v))
        assert out.shape == q.shape and lse.shape == (q.shape[0], q.shape[2], q.shape[1])
        assert kernel(q, k, v)[0].shape == q.shape  # NumPy
    assert len(fake.launches) == 2


def test_without_keys_scales_of_blocks_have_no_address(fake: FakeCuda, torch) -> None:
    """A joined tile reads the scale of a block that it masks whole; the workspace has none, and a null pointer stands for 1."""
    joined = {"tile_kv": 64, "reference": "stale", "fuse_tiles": True}
    p = schedule_plan(PAPER_FP8, precision="int8", scale_granularity="block", **joined)
    seen = []
    launched, kernel = iter(p.kernels), make(p, fake)
    fake.kernel = lambda params: seen.append(read_arguments(next(launched), params)[1])
    kernel(*(Tensor(x) for x in qkv(sk=0)))
    attention = seen[-1]
    assert p.kernels[-1].name == "attention" and attention.q_descale and (attention.k_descale, attention.v_descale) == (0, 0)


# what a repeated call does ------------------------------------------------------------------------------------------------


def test_a_repeated_call_launches_on_the_callers_stream_and_does_nothing_else(fake: FakeCuda, torch) -> None:
    tensors = [Tensor(x) for x in qkv()]
    kernel = make(schedule_plan(), fake)
    kernel(*tensors)
    fake.calls.clear()
    kernel(*tensors)
    kernel(*tensors, stream=0x99)
    kernel(*tensors, stream=type("Stream", (), {"cuda_stream": 0x98})())
    assert [x.stream for x in fake.launches] == [STREAM, STREAM, 0x99, 0x98]
    assert set(fake.calls) == {"cuCtxGetCurrent", "cuCtxPushCurrent", "cuLaunchKernelEx", "cuCtxPopCurrent"}
    fake.contexts.append(0xC0)  # torch has made its context current
    fake.calls.clear()
    kernel(*tensors)
    assert fake.calls == ["cuCtxGetCurrent", "cuLaunchKernelEx"]
    assert torch.allocated == 2 * 5, "out and lse of each call"


def test_tensor_maps_are_encoded_once_per_address(fake: FakeCuda, torch) -> None:
    p = schedule_plan()
    kernel = make(p, fake)
    sets = [[Tensor(x.copy()) for x in qkv()] for _ in range(3)]
    for tensors in sets * 2:
        kernel(*tensors)
    assert fake.calls.count("cuTensorMapEncodeTiled") == 3 * len(sets)
    seen = []
    fake.kernel = lambda params: seen.append({t: m[0] for t, m in read_arguments(p.kernels[0], params)[0].items()})
    for tensors in (sets[0], sets[2], sets[0]):
        kernel(*tensors)
    assert seen == [{n: t.data_ptr() for n, t in zip("qkv", tensors)} for tensors in (sets[0], sets[2], sets[0])]


def test_memory_of_encoded_maps_is_bounded(fake: FakeCuda, torch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fagen.arguments.MAX_ENCODED", 2)
    kernel = make(schedule_plan(), fake)
    a, b, c = ([Tensor(x.copy()) for x in qkv()] for _ in range(3))
    for tensors in (a, b, a, c, a, b, c):
        kernel(*tensors)
    assert fake.calls.count("cuTensorMapEncodeTiled") == 3 * 3
    kernel(*a)  # in neither set of argument buffers any more, and the least recently looked up when c came
    assert fake.calls.count("cuTensorMapEncodeTiled") == 3 * 4
    kernel(c[0], a[1], c[2])
    assert fake.calls.count("cuTensorMapEncodeTiled") == 3 * 4
    assert {len(slot._encoded) for call in kernel._bound.values() for slot in call._latest.arguments[0]._maps} == {2}


def test_the_number_of_bound_calls_is_bounded(fake: FakeCuda, torch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fagen.launch.MAX_BOUND_CALLS", 3)
    kernel = make(schedule_plan(), fake)
    for sq in range(1, 9):
        kernel(*(Tensor(x) for x in qkv(sq=sq)))
    assert len(kernel._bound) == len(kernel._torch_calls) == 3


def test_the_module_is_loaded_once_per_device_and_with_its_shared_memory(monkeypatch: pytest.MonkeyPatch, torch) -> None:
    fake = install(monkeypatch, devices=2)
    p = schedule_plan()
    kernel = make(p, fake)
    first, second = ([Tensor(x, Device("cuda", i)) for x in qkv()] for i in (0, 1))
    for tensors in (first, second, first, second):
        kernel(*tensors)
    assert fake.calls.count("cuModuleLoadData") == fake.calls.count("cuFuncSetAttribute") == 2
    assert [x.context for x in fake.launches] == [0xC0, 0xC1, 0xC0, 0xC1]
    assert [x.stream for x in fake.launches] == [STREAM, STREAM + 1] * 2
    assert {x.smem for x in fake.launches} == {p.kernels[0].smem_bytes}
    kernel.unload()
    assert fake.calls.count("cuModuleUnload") == 2
    kernel(*first)
    assert fake.calls.count("cuModuleLoadData") == 3


def test_threads_do_not_mix_their_addresses(fake: FakeCuda, torch) -> None:
    p = schedule_plan()
    kernel, wrong = make(p, fake), []

    def launched(params: int) -> None:
        maps, struct = read_arguments(p.kernels[0], params)
        q, out = maps["q"][0], struct.out
        if device_array(q, (1,), (2,), "bf16")[0] != device_array(out, (1,), (2,), "bf16")[0]:
            wrong.append((q, out))

    def work(i: int) -> None:
        tensors = [Tensor(np.full_like(x, i)) for x in qkv()]
        out = Tensor(np.full_like(tensors[0].array, i))
        for _ in range(100):
            kernel(*tensors, out=out)

    fake.kernel = launched
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(fake.launches) == 400 and not wrong


# workspaces, streams and graphs -------------------------------------------------------------------------------------------


def scratch_addresses(p: Plan, fake: FakeCuda) -> list[int]:
    seen: list[int] = []
    fake.kernel = lambda params: seen.append(read_arguments(p.kernels[0], params)[1].scratch)
    return seen


def test_every_stream_and_every_capture_has_its_own_zeroed_slot(fake: FakeCuda, torch) -> None:
    p = with_workspace(schedule_plan(), 8)
    kernel = Kernel(p, "", b"", None)
    seen = scratch_addresses(p, fake)
    tensors = [Tensor(x) for x in qkv()]
    kernel(*tensors, stream=1)
    assert (device_array(seen[0], (2,), (4,), "fp32") == 0).all()
    kernel(*tensors, stream=1)
    kernel(*tensors, stream=5)
    fake.calls.clear()
    fake.capturing[1] = 41
    kernel(*tensors, stream=1)
    fake.capturing[1] = 42
    kernel(*tensors, stream=1)
    fake.capturing.clear()
    kernel(*tensors, stream=1)
    assert seen[0] == seen[1] == seen[5]
    assert len({seen[0], *seen[2:5]}) == 4
    assert all((a - min(seen)) % SLOT_BYTES == 0 for a in seen)
    assert not {"cuMemAlloc", "cuModuleLoadData", "cuStreamSynchronize", "cuMemsetD8Async"} & set(fake.calls)


def test_the_per_thread_stream_has_a_slot_per_thread(fake: FakeCuda, torch) -> None:
    p = with_workspace(schedule_plan(), 8)
    kernel = Kernel(p, "", b"", None)
    seen = scratch_addresses(p, fake)
    tensors = [Tensor(x) for x in qkv()]
    kernel(*tensors, stream=driver.PER_THREAD_STREAM)
    thread = threading.Thread(target=lambda: kernel(*tensors, stream=driver.PER_THREAD_STREAM))
    thread.start()
    thread.join()
    assert len(set(seen)) == 2


def test_an_exhausted_pool_says_so(fake: FakeCuda, torch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fagen.workspace.SLOTS", 2)
    kernel = Kernel(with_workspace(schedule_plan(), 8), "", b"", None)
    tensors = [Tensor(x) for x in qkv()]
    for stream in (1, 5):
        kernel(*tensors, stream=stream)
    with pytest.raises(LaunchError, match=r"all 2 workspace slots of cuda:0 are taken"):
        kernel(*tensors, stream=6)
    kernel(*tensors, stream=5)
    assert SLOTS * SLOT_BYTES == 1 << 20


def test_a_large_workspace_grows_outside_captures_and_is_taken_over_by_one(fake: FakeCuda, torch) -> None:
    p = scratch_plan()
    kernel = Kernel(p, "", b"", None)
    seen = scratch_addresses(p, fake)
    small, large = ([Tensor(x) for x in qkv(sq=sq)] for sq in (2, 9))
    kernel(*small, stream=3)
    kernel(*large, stream=3)
    assert seen[0] not in fake.memory, "the smaller buffer was freed"
    kernel(*small, stream=3)
    assert seen[2] == seen[1]
    fake.capturing[3] = 7
    kernel(*large, stream=3)
    kernel(*small, stream=3)
    assert seen[3] == seen[4] == seen[1], "both launches of the capture use the buffer of the warm-up"
    fake.capturing.clear()
    kernel(*large, stream=3)
    assert seen[5] != seen[1], "the graph keeps its buffer"
    fake.capturing[4] = 8
    count = len(fake.launches)
    with pytest.raises(LaunchError, match=r"'scratch' \(8192 bytes\) .* warm up first"):
        kernel(*small, stream=4)
    assert len(fake.launches) == count


def scratch_plan() -> Plan:
    """With a workspace of 4 KiB a query."""
    p = schedule_plan()
    kernel = with_workspace(p, 4096).kernels[0]
    return replace(p, kernels=(kernel,), workspaces=(Workspace("scratch", "fp32", sym("sq") * 1024, zeroed=False),))


def test_unloading_frees_the_workspaces_of_streams_and_captures_but_not_those_of_other_kernels(fake: FakeCuda, torch) -> None:
    p = scratch_plan()
    kernel, other = Kernel(p, "", b"", None), Kernel(p, "", b"", None)
    seen = scratch_addresses(p, fake)
    tensors = [Tensor(x) for x in qkv()]
    for k, stream in ((kernel, 3), (other, 4)):
        k(*tensors, stream=stream)
        fake.capturing[stream] = 10 + stream
        k(*tensors, stream=stream)
        fake.capturing.clear()
        k(*tensors, stream=stream)
    mine, theirs = set(seen[:3]), set(seen[3:])
    assert len(mine) == len(theirs) == 2 and mine | theirs <= set(fake.memory)
    fake.calls.clear()
    kernel.unload()
    assert not mine & set(fake.memory) and theirs <= set(fake.memory)
    assert fake.calls.index("cuCtxSynchronize") < fake.calls.index("cuMemFree"), "queued launches may use them"
    kernel(*tensors, stream=3)
    assert seen[-1] in fake.memory, "the next call allocates again"
    kernel(*tensors, stream=4)
    assert seen[-1] in theirs, "kernels share what a stream has"


def test_many_sizes_streams_and_graphs_leave_no_memory_behind(fake: FakeCuda, torch) -> None:
    p = scratch_plan()
    seen = scratch_addresses(p, fake)
    base = None
    for case in range(6):
        kernel = Kernel(p, "", b"", None)
        tensors = [Tensor(x) for x in qkv(sq=2 + case)]
        for stream in (7, 20 + case):
            kernel(*tensors, stream=stream)
            fake.capturing[stream] = 100 + 10 * case + stream
            kernel(*tensors, stream=stream)
            fake.capturing.clear()
        kernel.unload()
        base = base or set(fake.memory)
        assert set(fake.memory) == base
    assert len(seen) == 24


def test_an_allocation_that_fails_leaves_no_freed_buffer_in_use(fake: FakeCuda, torch) -> None:
    p = scratch_plan()
    kernel = Kernel(p, "", b"", None)
    seen = scratch_addresses(p, fake)
    small, large = ([Tensor(x) for x in qkv(sq=sq)] for sq in (2, 9))
    kernel(*small, stream=3)
    fake.fail["cuMemAlloc"] = fake.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(driver.DriverError, match=r"CUDA_ERROR_OUT_OF_MEMORY"):
        kernel(*large, stream=3)
    assert seen[0] not in fake.memory
    fake.fail.clear()
    kernel(*small, stream=3)
    assert seen[-1] in fake.memory


def test_the_slots_of_graphs_return_when_their_kernel_is_unloaded(fake: FakeCuda, torch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fagen.workspace.SLOTS", 2)
    kernel = Kernel(with_workspace(schedule_plan(), 8), "", b"", None)
    tensors = [Tensor(x) for x in qkv()]
    for capture in (1, 2, 3):
        kernel(*tensors, stream=1)
        fake.capturing[1] = capture
        kernel(*tensors, stream=1)
        fake.capturing.clear()
        kernel.unload()


def test_remembered_addresses_are_bounded(fake: FakeCuda, torch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fagen.workspace.MAX_READY", 4)
    p = scratch_plan()
    kernel = Kernel(p, "", b"", None)
    seen = scratch_addresses(p, fake)
    for sq in (20, *range(1, 20)):
        kernel(*(Tensor(x) for x in qkv(sq=sq)), stream=3)
    assert len(set(seen)) == 1 and len(fagen.launch.workspaces(0)._ready) <= 4


def test_a_first_call_inside_a_capture_is_refused_before_it_touches_the_driver(fake: FakeCuda, torch) -> None:
    kernel = make(schedule_plan(), fake)
    tensors = [Tensor(x) for x in qkv()]
    fake.capturing[STREAM] = 1
    with pytest.raises(LaunchError, match=r"warm up first"):
        kernel(*tensors)
    assert not {"cuModuleLoadData", "cuMemAlloc", "cuLaunchKernelEx"} & set(fake.calls)
    fake.capturing.clear()
    kernel(*tensors)
    fake.capturing[0x55] = 2
    kernel(*tensors, stream=0x55)  # a stream never seen before
    kernel(*(Tensor(x) for x in qkv(sq=9)), stream=0x55)  # and sizes never seen before
    assert [x.stream for x in fake.launches] == [STREAM, 0x55, 0x55]


# errors -------------------------------------------------------------------------------------------------------------------


def test_a_refused_tensor_map_names_the_tensor_and_its_strides(fake: FakeCuda, torch) -> None:
    fake.fail["cuTensorMapEncodeTiled"] = fake.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(
        InputError, match=r"^q: TMA cannot address it: strides \(512, 128, 128, 2560\) bytes.*CUDA_ERROR_INVALID_VALUE"
    ):
        make(schedule_plan(), fake)(*(Tensor(x) for x in qkv()))


def test_a_failed_launch_names_the_call(fake: FakeCuda, torch) -> None:
    fake.fail["cuLaunchKernelEx"] = fake.CUresult.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(driver.DriverError, match=r"cuLaunchKernelEx failed: CUDA_ERROR_LAUNCH_FAILED \(what the driver says\)"):
        make(schedule_plan(), fake)(*(Tensor(x) for x in qkv()))
    assert not fake.contexts


def test_after_a_failed_numpy_call_the_first_error_is_reported(fake: FakeCuda) -> None:
    for call in ("cuLaunchKernelEx", "cuMemFree"):
        fake.fail[call] = fake.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(driver.DriverError, match=r"cuLaunchKernelEx"):
        make(schedule_plan(), fake)(*qkv())
    assert not fake.contexts


@pytest.mark.parametrize(("name", "capability"), [("fa3", (10, 0)), ("fa3", (8, 0)), ("fa2", (8, 9)), ("fa2", (10, 0))])
def test_a_device_that_cannot_run_the_cubin_is_named(
    name: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch, torch
) -> None:
    fake = install(monkeypatch, compute_capability=capability)
    p = schedule_plan(name)
    with pytest.raises(
        LaunchError, match=rf"kernels for {p.target.arch} .* compute capability 9.0.*{capability[0]}\.{capability[1]}"
    ):
        make(p, fake)(*(Tensor(x) for x in qkv()))
    assert "cuModuleLoadData" not in fake.calls


def test_a_later_minor_version_runs_what_has_no_suffix(monkeypatch: pytest.MonkeyPatch, torch) -> None:
    fake = install(monkeypatch, compute_capability=(9, 3))
    make(schedule_plan("fa2"), fake)(*(Tensor(x) for x in qkv()))
    assert len(fake.launches) == 1


def test_descales_are_refused(fake: FakeCuda) -> None:
    with pytest.raises(InputError, match=r"^k_descale: given with bf16 inputs"):
        make(schedule_plan(), fake)(*qkv(), k_descale=1.0)


def test_debug_record_and_seed(fake: FakeCuda, torch) -> None:
    attention, schedule = load("fa3", head_dim=64)
    p = assemble(attention, schedule, debug=True)
    kernel, words = Kernel(p, "", b"", None), {}

    def launched(params: int) -> None:
        struct = read_arguments(p.kernels[0], params)[1]
        words["seed"] = struct.seed
        device_array(struct.debug, (2,), (4,), "fp32").view(np.uint32)[:] = (7, 2**32 - 1)

    fake.kernel = launched
    with pytest.raises(LaunchError, match=r"debug records of the devices"):
        kernel.debug_record()
    kernel.seed = 12
    kernel(*(Tensor(x) for x in qkv()))
    assert words["seed"] == 12 and kernel.debug_record()[:3] == (7, 2**32 - 1, 0)
    with pytest.raises(LaunchError, match=r"not a debug build"):
        make(schedule_plan(), fake).debug_record()


def test_bind_refuses_a_grid_beyond_the_limit(fake: FakeCuda) -> None:
    p = schedule_plan("fa2", parallelism="query_tiles")
    strides = dict.fromkeys(("q", "k", "v", "out"), (64, 64, 64))
    assert p.bind(Problem(65536, 1, 1, 1, 1), strides, 132).kernels[0].grid == 65536
    with pytest.raises(InputError, match=r"too large|grid of"):
        p.bind(Problem(1 << 20, 1 << 20, 1, 4, 4), strides, 132)


# no GPU -------------------------------------------------------------------------------------------------------------------


def run_python(code: str, **env: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env}, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_touches_no_gpu_and_no_framework() -> None:
    loaded = run_python(
        "import sys, os, fagen, fagen.launch, fagen.driver, fagen.interop, fagen.npz\n"
        "maps = open('/proc/self/maps').read() if os.path.exists('/proc/self/maps') else ''\n"
        "print([m for m in ('torch', 'cupy', 'jax') if m in sys.modules], 'libcuda.so' in maps, fagen.driver.api.cache_info().currsize)"
    )
    assert loaded == "[] False 0"


@pytest.mark.parametrize(
    ("status", "text"),
    [
        ("CUDA_ERROR_NO_DEVICE", "no GPU: the CUDA driver sees no device (CUDA_VISIBLE_DEVICES='')"),
        ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "no GPU: cuInit failed: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
        (None, "no GPU: the CUDA driver library (libcuda) cannot be used: no libcuda here"),
    ],
)
def test_what_is_missing_is_named_in_one_line(status: str | None, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver as bindings

    def init(flags: int):
        if status is None:
            raise RuntimeError("no libcuda here.\nmore lines")
        return (getattr(bindings.CUresult, status),)

    monkeypatch.setattr(bindings, "cuInit", init)
    monkeypatch.setattr(bindings, "cuGetErrorName", lambda s: (0, s.name.encode()))
    monkeypatch.setattr(bindings, "cuGetErrorString", lambda s: (0, b"why"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    driver.api.cache_clear()
    with pytest.raises(LaunchError) as error:
        driver.device_count()
    assert str(error.value).startswith(text) and "\n" not in str(error.value)
    driver.api.cache_clear()


def test_the_bindings_word_for_a_missing_library_becomes_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver as bindings
    from cuda.pathfinder import DynamicLibNotFoundError

    def init(flags: int):
        raise DynamicLibNotFoundError("at length")

    monkeypatch.setattr(bindings, "cuInit", init)
    driver.api.cache_clear()
    with pytest.raises(
        LaunchError, match=r"^no GPU: the CUDA driver library \(libcuda\) is not installed; it comes with the NVIDIA driver$"
    ):
        driver.device_info(0)
    driver.api.cache_clear()


def test_a_numpy_call_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing():
        raise LaunchError("no GPU: none")

    monkeypatch.setattr(driver, "api", missing)
    kernel = Kernel(schedule_plan(), "", b"", None)
    with pytest.raises(LaunchError, match=r"no GPU"):
        kernel(*qkv())
    with pytest.raises(InputError, match=r"head_dim 32"):  # the arguments are looked at first
        kernel(*qkv(d=32))


def test_errors_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(driver.DriverError("cuX", "CUDA_ERROR_Y", "text")))
    assert (error.call, error.code, str(error)) == ("cuX", "CUDA_ERROR_Y", "cuX failed: CUDA_ERROR_Y (text)")
    assert isinstance(error, fagen.FagenError)


def test_bound_call_takes_any_context(fake: FakeCuda) -> None:
    p = schedule_plan()
    strides = dict.fromkeys(("q", "k", "v", "out"), (5 * 256, 256, 64))
    call = BoundCall(p, p.bind(Problem(1, 5, 5, 4, 4), strides, 132), 0, (1,), None)
    fake.contexts.append(0xEE)
    call.run((256, 512, 768, 1024, 1280), 9)
    assert fake.launches[0].context == 0xC0 and fake.contexts == [0xEE]
    with pytest.raises(InputError, match=r"^v: its data begins at 0x308, 8 bytes past a multiple of 16"):
        call.run((256, 512, 776, 1024, 1280), 9)
    with pytest.raises(InputError, match=r"^lse: .* 2 bytes past a multiple of 4"):
        call.run((256, 512, 768, 1024, 1282), 9)
