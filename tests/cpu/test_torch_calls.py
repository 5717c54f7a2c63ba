"""The short way of repeated calls with torch tensors: that it is taken, that it is short, and that no call gets what belongs to
another: addresses, streams, devices, strides, descales, workspaces."""

from __future__ import annotations

import gc
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_cuda import Device, FakeCuda, Tensor, attention_kernel, fake_torch, install, params_struct, read_arguments

import fagen
from fagen import InputError, attend, torch_calls
from fagen.launch import Kernel
from fagen.library import load
from fagen.plan import Plan, assemble
from fagen.torch_calls import key_of
from fagen.workspace import SINK_BYTES, sink

BF16 = ml_dtypes.bfloat16
STREAM = 0x70


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = install(monkeypatch, devices=2)
    fake.contexts.append(0xC0)  # torch has made its context current
    return fake


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    return fake_torch(monkeypatch, STREAM)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, fake: FakeCuda) -> Iterator[list[Kernel]]:
    """`fagen.attention` without a compiler; the kernels it asked for."""
    made: list[Kernel] = []

    def compile_(attention: Any, schedule: Any) -> Kernel:
        plan = assemble(attention, schedule)
        fake.kernel = attention_kernel(plan)
        made.append(Kernel(plan, "", b"", None))
        return made[-1]

    def forget() -> None:
        for cache in (attend._torch_calls, attend._calls, attend._kernels):
            cache.clear()

    forget()
    monkeypatch.setattr(attend.api, "compile", compile_)
    yield made
    forget()


def make(fake: FakeCuda, name: str = "fa3", **changes: Any) -> Kernel:
    plan = assemble(*load(name, **{"head_dim": 64, "parallelism": "persistent_static", **changes}))
    fake.kernel = attention_kernel(plan)
    return Kernel(plan, "", b"", None)


def qkv(batch: int = 2, sq: int = 5, sk: int = 7, hq: int = 4, hkv: int = 2, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((batch, n, h, 64)).astype(BF16) for n, h in ((sq, hq), (sk, hkv), (sk, hkv))]


def on(arrays: Any, index: int = 0) -> list[Tensor]:
    return [Tensor(x, Device("cuda", index)) for x in arrays]


def close(result: tuple[Any, Any], arrays: Any, mask: str = "full") -> None:
    want, want_lse = fagen.reference(fagen.Attention(head_dim=64, mask=mask), *(np.ascontiguousarray(x) for x in arrays))
    np.testing.assert_allclose(result[0].array.astype(np.float64), want, atol=0.02)
    np.testing.assert_allclose(result[1].array, want_lse, atol=1e-4)


class Way:
    """Whether calls went the short way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.long = 0
        whole = Kernel._call_any

        def counted(kernel: Kernel, *arguments: Any) -> Any:
            self.long += 1
            return whole(kernel, *arguments)

        monkeypatch.setattr(Kernel, "_call_any", counted)

    def was_short(self, call: Callable[[], Any]) -> Any:
        before = self.long
        result = call()
        assert self.long == before, "the call was checked as if it were new"
        return result

    def was_long(self, call: Callable[[], Any]) -> Any:
        before = self.long
        result = call()
        assert self.long == before + 1, "the call was taken for one seen before"
        return result


@pytest.fixture
def way(monkeypatch: pytest.MonkeyPatch) -> Way:
    return Way(monkeypatch)


@pytest.fixture(params=["with torch's fast functions", "without"])
def any_torch(request: pytest.FixtureRequest, torch: Any) -> Any:
    if request.param == "without":
        torch.empty_strided = lambda shape, strides, dtype, device: torch.empty(shape, dtype, torch.current_device)
        del torch._C._dynamo
    return torch


# what a call costs ----------------------------------------------------------------------------------------------------------------


PACKAGE = str(Path(fagen.__file__).parent)


def entered(call: Callable[[], Any]) -> list[str]:
    """Functions of fagen that a call enters, but for those of the stand-ins for torch's own."""
    names = []

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE) and "lambda" not in frame.f_code.co_name:
            names.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names


def test_a_repeated_call_enters_few_functions_and_the_driver_once(fake: FakeCuda, torch: Any, compiled: Any, way: Way) -> None:
    q, k, v = on(qkv())
    kernel = make(fake)
    calls = (lambda: kernel(q, k, v), lambda: kernel(q, k, v, out, lse), lambda: fagen.attention(q, k, v))
    out, lse = kernel(q, k, v)
    for call in calls:
        call()
        call()
        fake.calls.clear()
        fake.kernel = None
        names = [
            n
            for n in way.was_short(lambda call=call: entered(call))
            if n not in ("contiguous_strides", "_filled", "_write", "write")
        ]
        assert names in (["__call__", "run", "run"], ["attention", "run", "run"], ["attention", "run", "run", "pointers"])
        assert [c for c in fake.calls if c != "cuStreamIsCapturing"] == ["cuCtxGetCurrent", "cuLaunchKernelEx"]


def test_new_outputs_encode_nothing(fake: FakeCuda, torch: Any) -> None:
    q, k, v = on(arrays := qkv())
    kernel = make(fake)
    kernel(q, k, v)
    fake.calls.clear()
    kept = [kernel(q, k, v) for _ in range(5)]
    assert "cuTensorMapEncodeTiled" not in fake.calls
    assert len({out.data_ptr() for out, _ in kept}) == len({lse.data_ptr() for _, lse in kept}) == 5
    for result in kept:
        close(result, arrays)


def test_an_unchanged_call_writes_no_argument(fake: FakeCuda, torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fagen.arguments import KernelArguments

    tensors, written = on(qkv()), []
    kernel = make(fake)
    outputs = kernel(*tensors)
    write = KernelArguments.write
    monkeypatch.setattr(KernelArguments, "write", lambda self, *a: (written.append(a), write(self, *a)))
    other, third = kernel(*tensors), kernel(*tensors)
    assert len(written) == 2
    for given in (third, other, third, third, other):
        kernel(*tensors, *given)
    assert len(written) == 2, "two sets of buffers remember the last two"
    for given in (outputs, third, outputs, other):
        kernel(*tensors, *given)
    assert len(written) == 5


# whose addresses ------------------------------------------------------------------------------------------------------------------


def test_every_call_reads_the_addresses_of_its_own_tensors(fake: FakeCuda, any_torch: Any) -> None:
    kernel = make(fake)
    sets = [qkv(seed=i) for i in range(4)]
    outputs = [(Tensor(np.full_like(s[0], 9)), Tensor(np.full((2, 4, 5), 9, np.float32))) for s in sets]
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        for i in order:
            close(kernel(*on(sets[i])), sets[i])
            close(kernel(*on(sets[i]), *outputs[i]), sets[i])
            close(kernel(*on(sets[i]), out=outputs[i][0]), sets[i])
            close(kernel(*on(sets[i]), lse=outputs[i][1]), sets[i])


def test_one_tensor_that_changes_in_place_is_read_anew(fake: FakeCuda, torch: Any) -> None:
    """As by resize_, set_ or t_: the same object has other sizes, strides or memory."""
    kernel = make(fake)
    q, k, v = on(qkv())
    close(kernel(q, k, v), (q.array, k.array, v.array))
    close(kernel(q, k, v), (q.array, k.array, v.array))
    for sizes in ({"sq": 9}, {"sk": 3}, {"batch": 1}, {"seed": 5}, {}):
        arrays = qkv(**sizes)
        for tensor, array in zip((q, k, v), arrays):
            tensor.array, tensor.shape = array, array.shape
        close(kernel(q, k, v), arrays)
    k.array = np.ascontiguousarray(k.array.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)  # other strides, same shape
    close(kernel(q, k, v), (q.array, k.array, v.array))


def test_no_tensor_is_kept_alive(fake: FakeCuda, torch: Any, compiled: Any) -> None:
    kernel = make(fake)
    for call in (kernel, fagen.attention):
        for _ in range(3):
            tensors = on(qkv())
            result = call(*tensors)
            alive = [weakref.ref(t) for t in (*tensors, *(result if isinstance(result, tuple) else (result,)))]
            del tensors, result
            gc.collect()
            assert not any(r() for r in alive)


def test_equal_shapes_of_other_strides_are_another_kind(fake: FakeCuda, any_torch: Any, way: Way) -> None:
    kernel = make(fake)
    plain = qkv()
    turned = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in plain]
    mixed = [turned[0], plain[1], turned[2]]
    for arrays in (plain, turned, mixed):
        close(way.was_long(lambda a=arrays: kernel(*on(a))), arrays)
    for arrays in (turned, plain, mixed, plain, turned):
        close(way.was_short(lambda a=arrays: kernel(*on(a))), arrays)
    fagen_out = np.full((2, 5, 6, 64), 7, BF16)
    for _ in range(2):
        kernel(*on(plain), out=Tensor(fagen_out[:, :, 1:5]), lse=Tensor(np.zeros((2, 4, 5), np.float32)))
        assert (fagen_out[:, :, [0, 5]] == 7).all() and not (fagen_out[:, :, 1:5] == 7).all()


def test_a_failure_while_the_arguments_are_written_leaves_none_half_written(fake: FakeCuda, torch: Any) -> None:
    kernel = make(fake)
    first, second = qkv(seed=1), qkv(seed=2)
    tensors = on(first)
    out, lse = kernel(*tensors)
    others = on(second)
    fake.fail["cuTensorMapEncodeTiled"] = fake.CUresult.CUDA_ERROR_INVALID_VALUE
    count = len(fake.launches)
    with pytest.raises(InputError, match=r"^k: TMA cannot address it"):
        kernel(tensors[0], others[1], others[2], out, lse)
    assert len(fake.launches) == count
    fake.fail.clear()
    close(kernel(*tensors, out, lse), first)
    close(kernel(*others, out, lse), second)


def test_addresses_are_checked_in_every_call(fake: FakeCuda, torch: Any) -> None:
    kernel = make(fake)
    q, k, v = on(qkv())
    kernel(q, k, v)
    raw = np.zeros(k.array.nbytes + 64, np.uint8)
    shift = -raw.ctypes.data % 16 + 8
    crooked = Tensor(raw[shift : shift + k.array.nbytes].view(BF16).reshape(k.shape))
    for _ in range(2):
        with pytest.raises(InputError, match=r"^k: its data begins at .* 8 bytes past a multiple of 16"):
            kernel(q, crooked, v)
    kernel(q, k, v)


# what makes another kind ------------------------------------------------------------------------------------------------------------


def wrong_dtype(x: np.ndarray) -> Tensor:
    return Tensor(x.astype(np.float16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: {"q": wrong_dtype(a["q"].array)}, r"^q: is fp16; this kernel reads bf16|^k: is bf16; this kernel reads fp16"),
        (lambda a: {"k": wrong_dtype(a["k"].array)}, r"^k: is fp16; this kernel reads bf16"),
        (lambda a: {"v": wrong_dtype(a["v"].array)}, r"^v: is fp16; this kernel reads bf16"),
        (lambda a: {"out": wrong_dtype(a["out"].array)}, r"^out: is fp16; this kernel writes bf16"),
        (lambda a: {"lse": wrong_dtype(a["lse"].array)}, r"^lse: is fp16; this kernel writes fp32"),
        (lambda a: {"v": Tensor(a["v"].array, Device("cuda", 1))}, r"^v: is on cuda:1, q on cuda:0"),
        (lambda a: {"out": Tensor(a["out"].array, Device("cuda", 1))}, r"^out: is on cuda:1, q on cuda:0"),
        (lambda a: {"k": Tensor(a["k"].array, Device("xpu", 0))}, r"^k: is a torch tensor on xpu:0"),
        (lambda a: {"lse": Tensor(a["lse"].array, Device("cpu", None))}, r"^lse: is a torch tensor on cpu"),
        (lambda a: {"v": Tensor(a["v"].array[:, :3])}, r"^v: has seqlen_k 3, but k's is 7"),
        (lambda a: {"lse": Tensor(a["lse"].array[:, :, ::-1])}, r"^lse: must be contiguous"),
        (lambda a: {"out": Tensor(a["out"].array[:, :, :, ::-1])}, r"^out: the last dimension has stride -1"),
        (lambda a: {"out": a["lse"], "lse": a["out"]}, r"^out: has 3 dimensions"),
        (lambda a: {"k": a["k"].array}, r"^k: is a NumPy array, q a torch one"),
        (lambda a: {"q_descale": 1.0}, r"^q_descale: given with bf16 inputs"),
    ],
)
@pytest.mark.parametrize("call", ["kernel", "attention"])
def test_a_wrong_argument_is_named_after_right_calls(
    call: str, change: Any, message: str, fake: FakeCuda, any_torch: Any, compiled: Any
) -> None:
    run = make(fake) if call == "kernel" else fagen.attention
    arrays = qkv()
    good = dict(
        zip(("q", "k", "v", "out", "lse"), (*on(arrays), Tensor(np.zeros_like(arrays[0])), Tensor(np.zeros((2, 4, 5), np.float32))))
    )
    for _ in range(2):
        run(**good)
        run(good["q"], good["k"], good["v"])
    count, changed = len(fake.launches), change(good)
    for _ in range(2):
        with pytest.raises(InputError, match=message):
            run(**{**good, **changed})
        if not {"out", "lse"} & set(changed):
            with pytest.raises(InputError, match=message):
                run(**{"q": good["q"], "k": good["k"], "v": good["v"], **changed})
    assert len(fake.launches) == count


def test_one_tensor_in_two_places(fake: FakeCuda, torch: Any, way: Way) -> None:
    kernel = make(fake)
    (x,) = on(qkv(sq=6, hq=2)[:1])
    way.was_long(lambda: kernel(x, x, x))
    for _ in range(2):
        close(way.was_short(lambda: kernel(x, x, x)), (x.array, x.array, x.array))


def test_a_sparse_tensor_is_refused_after_dense_ones(fake: FakeCuda, torch: Any) -> None:
    kernel = make(fake)
    q, k, v = on(qkv())
    kernel(q, k, v)

    class Sparse(Tensor):
        def is_contiguous(self) -> bool:
            raise RuntimeError("sparse tensors do not have is_contiguous")

    sparse = Sparse(k.array)
    sparse.layout = "sparse_coo"
    with pytest.raises(InputError, match=r"^k: has layout sparse_coo"):
        kernel(q, sparse, v)


def test_another_mode_of_torch_is_learnt_but_not_forever(
    fake: FakeCuda, torch: Any, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another mode torch's comparison is False of the same tensors; the key decides, and the comparison is made anew."""
    made, mode = [], ["grad"]
    guards = torch._C._dynamo.guards

    class Moody(guards.TensorGuards):
        def __init__(self, *tensors: Any, **options: Any):
            super().__init__(*tensors, **options)
            self._mode = mode[0]
            made.append(self)

        def check(self, *tensors: Any) -> bool:
            return self._mode == mode[0] and super().check(*tensors)

    guards.TensorGuards = Moody
    kernel, tensors = make(fake), on(arrays := qkv())
    keys = []
    monkeypatch.setattr(torch_calls, "key_of", lambda *a: (keys.append(a), key_of(*a))[1])
    kernel(*tensors)
    kernel(*tensors)
    mode[0] = "inference"
    for _ in range(3):
        close(way.was_short(lambda: kernel(*tensors)), arrays)
    assert len(made) == 2
    count = len(keys)
    way.was_short(lambda: kernel(*tensors))
    assert len(keys) == count
    for i in range(40):
        mode[0] = ("grad", "inference")[i % 2]
        close(way.was_short(lambda: kernel(*tensors)), arrays)
    assert len(made) == 1 + torch_calls.MAX_LESSONS


# streams, devices, graphs -----------------------------------------------------------------------------------------------------------


def test_streams_take_turns(fake: FakeCuda, torch: Any, compiled: Any) -> None:
    tensors = on(qkv())
    kernel = make(fake)
    for call in (kernel, fagen.attention):
        call(*tensors)
        fake.launches.clear()
        for stream in (1, None, 0x99, 1, None):
            call(*tensors, stream=stream)
        assert [x.stream for x in fake.launches] == [1, STREAM, 0x99, 1, STREAM]


@pytest.mark.parametrize("call", ["kernel", "attention"])
def test_devices_take_turns_and_outputs_are_where_the_inputs_are(call: str, fake: FakeCuda, any_torch: Any, compiled: Any) -> None:
    run = make(fake) if call == "kernel" else lambda *tensors: fagen.attention(*tensors, return_lse=True)
    arrays = qkv()
    for current in (0, 1):
        any_torch.current_device = current
        for index in (0, 1, 0, 1):
            result = run(*on(arrays, index))
            assert all(x.device == Device("cuda", index) for x in result)
            assert (fake.launches[-1].context, fake.launches[-1].stream) == (0xC0 + index, STREAM + index)
            close(result, arrays)
    assert fake.contexts == [0xC0], "torch's context is back"


def test_any_context_may_be_current(fake: FakeCuda, torch: Any) -> None:
    kernel, tensors = make(fake), on(qkv())
    kernel(*tensors)
    for current in ([], [0xEE], [0xC1], [0xC0]):
        fake.contexts[:] = current
        kernel(*tensors)
        assert fake.launches[-1].context == 0xC0 and fake.contexts == current
    fake.contexts[:] = [0xEE]
    fake.fail["cuLaunchKernelEx"] = fake.CUresult.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(fagen.LaunchError, match=r"^cuLaunchKernelEx failed"):
        kernel(*tensors)
    assert fake.contexts == [0xEE]


def seen_struct(fake: FakeCuda, plan: Plan) -> list[dict[str, int]]:
    """Params of each launch from here on, as numbers."""
    seen: list[dict[str, int]] = []
    names = [n for n, _ in params_struct(plan.kernels[0])._fields_]

    def launched(params: int) -> None:
        struct = read_arguments(plan.kernels[0], params)[1]
        seen.append({n: getattr(struct, n) for n in names})

    fake.kernel = launched
    return seen


def test_tile_counters_belong_to_a_stream_or_a_capture(fake: FakeCuda, torch: Any, compiled: Any) -> None:
    tensors = on(qkv())
    for call in (make(fake, parallelism="persistent_dynamic"), lambda *a, **o: fagen.attention(*a, causal=True, **o)):
        call(*tensors, stream=1)
        kernel = compiled[-1] if compiled else call
        assert any(w.name == "counter" for w in kernel.plan.workspaces), "else this tests nothing"
        seen = seen_struct(fake, kernel.plan)
        call(*tensors, stream=1)
        call(*tensors, stream=5)
        for capture in (41, 42):
            fake.capturing[1] = capture
            call(*tensors, stream=1)
            call(*tensors, stream=1)
        fake.capturing.clear()
        call(*tensors, stream=1)
        counters = [s["counter"] for s in seen]
        assert counters[0] == counters[6] and counters[2] == counters[3] and counters[4] == counters[5]
        assert len(set(counters)) == 4


def test_a_captured_call_is_the_short_one(fake: FakeCuda, torch: Any, compiled: Any, way: Way) -> None:
    tensors = on(qkv())
    kernel = make(fake, parallelism="persistent_dynamic")
    for call in (kernel, fagen.attention):
        call(*tensors)
        fake.capturing[STREAM] = 3
        fake.calls.clear()
        way.was_short(lambda call=call: call(*tensors))
        fake.capturing.clear()
        assert not {"cuMemAlloc", "cuMemFree", "cuModuleLoadData", "cuStreamSynchronize", "cuTensorMapEncodeTiled"} & set(
            fake.calls
        )


def test_threads_do_not_mix_streams_or_addresses(fake: FakeCuda, torch: Any) -> None:
    kernel, wrong = make(fake), []
    seen = threading.local()

    def launched(params: int) -> None:
        seen.out = read_arguments(kernel.plan.kernels[0], params)[1].out

    def work(stream: int) -> None:
        fake.contexts.append(0xC0)
        tensors = on(qkv(seed=stream))
        out, lse = Tensor(np.zeros_like(tensors[0].array)), Tensor(np.zeros((2, 4, 5), np.float32))
        for _ in range(100):
            kernel(*tensors, out, lse, stream=stream)
            if seen.out != out.data_ptr():
                wrong.append(stream)

    kernel(*on(qkv()))
    fake.kernel = launched
    before = len(fake.launches)
    threads = [threading.Thread(target=work, args=(i,)) for i in (1, 5, 6, 7)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    streams = [x.stream for x in fake.launches[before:]]
    assert not wrong and {s: streams.count(s) for s in streams} == dict.fromkeys((1, 5, 6, 7), 100)


# descales ---------------------------------------------------------------------------------------------------------------------------


def test_descales_are_those_of_the_call(fake: FakeCuda, torch: Any, way: Way) -> None:
    kernel = make(fake, "fa3_fp8")
    tensors = on(x.astype(ml_dtypes.float8_e4m3fn) for x in qkv())
    arrays = [Tensor(np.full((2, 2), x, np.float32)) for x in (2, 3)]
    kernel(*tensors), kernel(*tensors, q_descale=1.0), kernel(*tensors, q_descale=arrays[0])
    seen = seen_struct(fake, kernel.plan)
    for given in (0.5, arrays[0], arrays[1], 0.25, None, arrays[0], 0.5):
        way.was_short(lambda given=given: kernel(*tensors, q_descale=given))
    pointers, values = [s["q_descale"] for s in seen], [s["q_descale_value"] for s in seen]
    a, b = (x.data_ptr() for x in arrays)
    assert pointers == [0, a, b, 0, 0, a, 0] and values == [0.5, 1, 1, 0.25, 1, 1, 0.5]
    with pytest.raises(InputError, match=r"^q_descale: is -1; a negative descale"):
        kernel(*tensors, q_descale=-1.0)
    with pytest.raises(InputError, match=r"^q_descale: .* \(1, 2\)|^q_descale: has shape \(1, 2\)"):
        kernel(*tensors, q_descale=Tensor(np.ones((1, 2), np.float32)))
    with pytest.raises(InputError, match=r"^q_descale: is a str"):
        kernel(*tensors, q_descale="2")


# what ends it -----------------------------------------------------------------------------------------------------------------------


def test_an_unloaded_kernel_is_loaded_again(fake: FakeCuda, torch: Any, compiled: Any, way: Way) -> None:
    tensors = on(arrays := qkv())
    fagen.attention(*tensors)
    way.was_short(lambda: fagen.attention(*tensors))
    (kernel,) = compiled
    kernel.unload()
    fake.calls.clear()
    way.was_long(lambda: fagen.attention(*tensors))
    assert "cuModuleLoadData" in fake.calls, "else it ran code that is gone"
    way.was_short(lambda: fagen.attention(*tensors))
    close(fagen.attention(*tensors, return_lse=True), arrays)
    kernel.unload()
    way.was_long(lambda: kernel(*tensors))


def test_another_seed_reaches_the_next_call(fake: FakeCuda, torch: Any) -> None:
    plan = assemble(*load("fa3", head_dim=64), debug=True)
    kernel, tensors = Kernel(plan, "", b"", None), on(qkv())
    seen = seen_struct(fake, plan)
    for seed in (3, 4, 3):
        kernel.seed = seed
        kernel(*tensors)
        kernel(*tensors)
    assert [s["seed"] for s in seen] == [3, 3, 4, 4, 3, 3]


def test_what_is_remembered_is_bounded_and_stays_right(
    fake: FakeCuda, torch: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fagen.launch.MAX_BOUND_CALLS", 2)
    monkeypatch.setattr(attend, "MAX_TORCH_CALLS", 3)
    kernel = make(fake)
    kernel._torch_calls = torch_calls.TorchCalls(3)
    sets = [qkv(sq=sq, seed=sq) for sq in range(1, 6)]
    for run in (kernel, lambda *tensors: fagen.attention(*tensors, return_lse=True)):
        for arrays in (*sets, *reversed(sets), *sets):
            close(run(*on(arrays)), arrays)
    assert len(kernel._bound) == 2 and len(kernel._torch_calls) == 3
    assert [len(calls) for calls in attend._torch_calls.values()] == [3]


# an lse that nobody wants -----------------------------------------------------------------------------------------------------------


def test_without_return_lse_only_out_is_allocated(fake: FakeCuda, torch: Any, compiled: Any) -> None:
    tensors = on(arrays := qkv())
    fagen.attention(*tensors)
    seen = seen_struct(fake, compiled[0].plan)
    torch.allocated = 0
    fagen.attention(*tensors)
    assert torch.allocated == 1 and seen[-1]["lse"] == sink(0, STREAM) in fake.memory
    assert len(fake.memory[seen[-1]["lse"]]) >= SINK_BYTES
    _, lse = fagen.attention(*tensors, return_lse=True)
    assert torch.allocated == 3 and seen[-1]["lse"] == lse.data_ptr() != sink(0, STREAM)
    given = Tensor(np.zeros((2, 4, 5), np.float32))
    fagen.attention(*tensors, lse=given)
    assert seen[-1]["lse"] == given.data_ptr()
    fake.kernel = attention_kernel(compiled[0].plan)
    close(fagen.attention(*tensors, return_lse=True), arrays)
    _, lse = compiled[0](*tensors)
    assert lse.data_ptr() != sink(0, STREAM), "a kernel's own calls return theirs"


def test_a_large_lse_has_memory_of_its_own(fake: FakeCuda, torch: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "SINK_BYTES", 4 * 2 * 4 * 5 - 1)
    tensors = on(qkv())
    fagen.attention(*tensors)
    torch.allocated = 0
    fagen.attention(*tensors)
    assert torch.allocated == 2
    monkeypatch.setattr(attend, "SINK_BYTES", 4 * 2 * 4 * 5)
    attend._torch_calls.clear()
    fagen.attention(*tensors)
    torch.allocated = 0
    fagen.attention(*tensors)
    assert torch.allocated == 1


def test_no_memory_is_allocated_for_it_inside_a_capture(fake: FakeCuda, torch: Any, compiled: Any) -> None:
    tensors = on(qkv())
    fagen.attention(*tensors, return_lse=True)  # loads the kernel and makes the sink
    fagen.workspace._sinks.clear()
    attend._torch_calls.clear()
    fake.capturing[STREAM] = 7
    fake.calls.clear()
    for _ in range(2):
        fagen.attention(*tensors)
    assert "cuMemAlloc" not in fake.calls and not attend._torch_calls
    fake.capturing.clear()
    fagen.attention(*tensors)
    torch.allocated = 0
    fagen.attention(*tensors)
    assert torch.allocated == 1


@pytest.mark.parametrize("name", ["standard", "fa1", "fa2", "fa3", "fa3_fp8"])
def test_no_kernel_reads_its_lse(name: str) -> None:
    """Else calls that share the place for unwanted ones would disturb one another."""
    source = (Path(__file__).resolve().parents[2] / "generated" / f"{name}.cu").read_text()
    uses = [line.strip() for line in source.splitlines() if "p.lse" in line]
    assert uses and all(line.startswith("store_row(") or re.search(r"\(p\.lse \+ .*\)\[r\] = ", line) for line in uses), uses
