"""Arguments of every library: what is accepted, what is refused and how the refusal reads. No GPU: see fake_cuda.py."""

from __future__ import annotations

import contextlib
import sys
import types

import ml_dtypes
import numpy as np
import pytest
from fake_cuda import Device, Exporter, FakeCuda, Tensor, attention_kernel, exporter_of, fake_torch, install

from fagen import Attention, InputError, driver
from fagen.interop import Array, check, framework_of, stream_handle
from fagen.interop.arrays import contiguous_strides, effective_strides
from fagen.interop.dlpack import _dtype
from fagen.interop.dlpack import framework_of as exporter_framework
from fagen.launch import Kernel
from fagen.library import load
from fagen.plan import Problem, assemble

BF16 = ml_dtypes.bfloat16
ATTENTION = Attention(head_dim=64, dtype="bf16")


def array(name: str, *shape: int, **changes) -> Array:
    values = {"device": 0, "dtype": "fp32" if name == "lse" else "bf16", "strides": contiguous_strides(shape), "ptr": 4096}
    return Array(name=name, shape=shape, **(values | changes))


def arguments(**changes) -> dict:
    """q, k and v that fit, some of them replaced."""
    good = {"q": array("q", 2, 5, 4, 64), "k": array("k", 2, 7, 2, 64), "v": array("v", 2, 7, 2, 64), "out": None, "lse": None}
    return good | changes


# strides, as NumPy makes them ----------------------------------------------------------------------------------------------

BIG = np.zeros((2, 12, 3, 4, 64), np.float16)
ONE = np.lib.stride_tricks.as_strided(np.zeros((2, 4, 64), np.float16), (1, 2, 4, 64), (6, 512, 128, 2))  # stride(0) 3 elements
VIEWS = [
    (BIG[:, :, 1], (9216, 768, 64)),  # a slice of a fused qkv
    (BIG[:, ::2, 1], (9216, 1536, 64)),  # every second token
    (BIG[:, :, 0, :1], (9216, 768, 64)),  # one head: its stride is the row-major one, 64
    (np.zeros((2, 4, 12, 64), np.float16).transpose(0, 2, 1, 3), (3072, 64, 768)),
    (np.broadcast_to(np.zeros((2, 12, 1, 64), np.float16), (2, 12, 4, 64)), (768, 64, 0)),
    (ONE, (512, 256, 64)),
    (np.broadcast_to(np.zeros((12, 4, 64), np.float16), (1, 12, 4, 64)), (3072, 256, 64)),
    (np.zeros((2, 0, 4, 64), np.float16), (256, 256, 64)),
]


@pytest.mark.parametrize(("view", "want"), VIEWS)
def test_strides_that_bind_gets(view: np.ndarray, want: tuple[int, int, int]) -> None:
    strides = tuple(s // 2 for s in view.strides)
    a = Attention(head_dim=64, dtype="fp16")
    q, k, v = (Array(n, 0, "fp16", view.shape, strides, 0) for n in "qkv")
    problem, bound = check(a, q, k, v, None, None)
    assert problem == Problem(view.shape[0], view.shape[1], view.shape[1], view.shape[2], view.shape[2])
    assert bound["q"] == bound["k"] == bound["v"] == want
    assert bound["out"] == contiguous_strides(view.shape)[:3]


def test_each_tensor_keeps_its_own_strides() -> None:
    _, bound = check(
        ATTENTION,
        **arguments(
            k=array("k", 2, 7, 2, 64, strides=(1792, 256, 64, 1)), out=array("out", 2, 5, 4, 64, strides=(4000, 800, 200, 1))
        ),
    )
    assert bound == {"q": (1280, 256, 64), "k": (1792, 256, 64), "v": (896, 128, 64), "out": (4000, 800, 200)}


def test_effective_strides() -> None:
    assert effective_strides((1, 3, 1, 8), (-5, 100, 7, 1)) == (24, 100, 8, 1)
    assert effective_strides((2, 0, 1), (9, 9, 9)) == (1, 1, 1)


# refusals -------------------------------------------------------------------------------------------------------------------

REFUSED = [
    ({"q": array("q", 5, 4, 64)}, "q", r"has 3 dimensions \(5, 4, 64\); expected 4: \(batch, seqlen_q, heads, head_dim\)"),
    ({"q": array("q", 2, 5, 4, 64, dtype="fp16")}, "q", "is fp16; this kernel reads bf16"),
    ({"v": array("v", 2, 7, 2, 64, dtype="float64")}, "v", "is float64; this kernel reads bf16"),
    ({"k": array("k", 2, 7, 2, 64, device=1)}, "k", "is on cuda:1, q on cuda:0"),
    ({"q": array("q", 2, 5, 4, 96)}, "q", "has head_dim 96, but the kernel's is 64"),
    ({"k": array("k", 2, 7, 2, 32)}, "k", "has head_dim 32, but the kernel's is 64"),
    ({"v": array("v", 2, 7, 2, 128)}, "v", "has head_dim_v 128, but the kernel's is 64"),
    ({"k": array("k", 3, 7, 2, 64)}, "k", "has batch 3, but q's is 2"),
    ({"v": array("v", 2, 8, 2, 64)}, "v", "has seqlen_k 8, but k's is 7"),
    ({"v": array("v", 2, 7, 1, 64)}, "v", "has kv_heads 1, but k's is 2"),
    ({"k": array("k", 2, 7, 3, 64), "v": array("v", 2, 7, 3, 64)}, "k", r"has 3 KV heads; q's 4 heads .* \(legal: \[1, 2, 4\]\)"),
    ({"k": array("k", 2, 7, 0, 64), "v": array("v", 2, 7, 0, 64)}, "k", "has 0 KV heads; q's 4 heads"),
    ({"q": array("q", 2, 5, 4, 64, strides=(2560, 512, 128, 2))}, "q", "the last dimension has stride 2"),
    ({"q": array("q", 2, 5, 4, 64, strides=(1280, 257, 64, 1))}, "q", "seqlen_q has stride 257, 514 bytes; .* multiple of 16"),
    ({"k": array("k", 2, 7, 2, 64, strides=(896, -128, 64, 1))}, "k", "seqlen_k has the negative stride -128"),
    ({"v": array("v", 2, 7, 2, 64, strides=(900, 128, 64, 1))}, "v", "batch has stride 900, 1800 bytes"),
    ({"out": array("out", 2, 5, 4, 128)}, "out", r"has shape \(2, 5, 4, 128\); expected \(2, 5, 4, 64\)"),
    ({"out": array("out", 2, 5, 4, 64, dtype="fp32")}, "out", "is fp32; this kernel writes bf16"),
    ({"out": array("out", 2, 5, 4, 64, strides=(1280, 256, 0, 1))}, "out", "elements that share memory"),
    ({"out": array("out", 2, 5, 4, 64, strides=(1280, 64, 64, 1))}, "out", "elements that share memory"),
    ({"out": array("out", 2, 5, 4, 64, strides=(1280, 256, 32, 1))}, "out", "elements that share memory"),
    ({"lse": array("lse", 2, 5, 4)}, "lse", r"has shape \(2, 5, 4\); expected \(2, 4, 5\)"),
    ({"lse": array("lse", 2, 4, 5, dtype="bf16")}, "lse", "is bf16; this kernel writes fp32"),
    ({"lse": array("lse", 2, 4, 5, strides=(20, 1, 4))}, "lse", "must be contiguous"),
]


@pytest.mark.parametrize(("changes", "argument", "text"), REFUSED)
def test_refusals_name_the_argument_and_the_numbers(changes: dict, argument: str, text: str) -> None:
    with pytest.raises(InputError, match=text) as error:
        check(ATTENTION, **arguments(**changes))
    assert error.value.argument == argument and "\n" not in str(error.value)


def test_what_fits_is_accepted() -> None:
    out = array("out", 2, 5, 4, 64, strides=(128, 1024, 256, 1))  # batch inside a row of seq: no overlap
    problem, bound = check(ATTENTION, **arguments(out=out, lse=array("lse", 2, 4, 5)))
    assert problem == Problem(2, 5, 7, 4, 2) and bound["out"] == (128, 1024, 256)


def test_strides_of_an_empty_problem_do_not_matter() -> None:
    empty = {n: array(n, 0, 5, 4, 64, strides=(3, 5, 7, 9)) for n in "qkv"}
    problem, _ = check(ATTENTION, **arguments(**empty))
    assert problem.empty


# whose tensors, and whose stream --------------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch, devices=2)


@pytest.fixture
def kernel(fake: FakeCuda) -> Kernel:
    p = assemble(*load("fa3", head_dim=64))
    fake.kernel = attention_kernel(p)
    return Kernel(p, "", b"", None)


def qkv(sk: int = 7) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.standard_normal(s).astype(BF16) for s in ((2, 5, 4, 64), (2, sk, 2, 64), (2, sk, 2, 64))]


def test_mixed_libraries_are_refused(kernel: Kernel, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(monkeypatch)
    q, k, v = qkv()
    for call, argument, text in [
        ((Tensor(q), k, Tensor(v)), "k", "is a NumPy array, q a torch one"),
        ((q, Tensor(k), v), "k", "is a torch array, q a NumPy one"),
        ((Tensor(q), Tensor(k), Exporter(v)), "v", "q a torch one"),
        ((Tensor(q), Tensor(k), [1, 2]), "v", "is a list; expected a torch, CuPy or JAX tensor"),
        ((Tensor(q), Tensor(k), None), "v", "is a NoneType"),
        ((Tensor(q), Tensor(k), Tensor(v), v), "out", "is a NumPy array"),
    ]:
        with pytest.raises(InputError, match=text) as error:
            kernel(*call)
        assert error.value.argument == argument
    assert not fake.launches


def test_torch_tensors_elsewhere_are_refused(kernel: Kernel, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(monkeypatch)
    q, k, v = (Tensor(x) for x in qkv())
    with pytest.raises(InputError, match=r"^q: is a torch tensor on cpu; move it to a GPU"):
        kernel(Tensor(q.array, Device("cpu", None)), k, v)
    with pytest.raises(InputError, match=r"^v: is on cuda:1, q on cuda:0"):
        kernel(q, k, Tensor(v.array, Device("cuda", 1)))
    k.layout = "sparse"
    k.stride = lambda: (_ for _ in ()).throw(RuntimeError("sparse tensors do not have strides"))
    with pytest.raises(InputError, match=r"^k: has layout sparse"):
        kernel(q, k, v)
    assert not fake.launches


def test_a_wrong_torch_call_is_refused_again_and_again(kernel: Kernel, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(monkeypatch)
    q, k, v = (Tensor(x) for x in qkv())
    wide = np.zeros((2, 5, 4, 72), BF16)
    kernel(q, k, v)
    kernel(Tensor(wide[..., :64]), k, v)
    for _ in range(2):
        with pytest.raises(InputError, match=r"^q: its data begins at .* 2 bytes past a multiple of 16"):
            kernel(Tensor(wide[..., 1:65]), k, v)
        with pytest.raises(InputError, match=r"^q: the last dimension has stride 2"):
            kernel(Tensor(np.zeros((2, 5, 4, 128), BF16)[..., ::2]), k, v)
    assert len(fake.launches) == 2


def test_cupy_runs_on_its_current_stream(kernel: Kernel, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    ndarray, made = exporter_of("cupy"), []
    cupy = types.ModuleType("cupy")
    cupy.cuda = types.SimpleNamespace(
        Device=lambda i: contextlib.nullcontext(), get_current_stream=lambda: types.SimpleNamespace(ptr=0x77)
    )
    cupy.empty = lambda shape, dtype: made.append(dtype) or ndarray(np.empty(shape, dtype))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    q, k, v = qkv()
    want, want_lse = kernel(q, k, v)
    tensors = [ndarray(x) for x in (q, k, v)]
    for _ in range(2):
        out, lse = kernel(*tensors)
        np.testing.assert_array_equal(out.array, want)
        np.testing.assert_array_equal(lse.array, want_lse)
    assert made == [BF16, np.float32] * 2
    assert [x.stream for x in fake.launches[1:]] == [0x77, 0x77]
    assert tensors[0].streams == [-1, -1], "no event is exchanged with the stream that made the array"
    kernel(*tensors, stream=types.SimpleNamespace(ptr=0x66))
    assert fake.launches[-1].stream == 0x66


def test_jax_results_are_new_arrays_and_complete(kernel: Kernel, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    ndarray = exporter_of("jaxlib._jax")
    ndarray.devices = lambda self: {"cuda:0"}
    chosen = []
    jax = types.ModuleType("jax")
    jax.default_device = lambda device: chosen.append(device) or contextlib.nullcontext()
    jax.numpy = types.SimpleNamespace(empty=lambda shape, dtype: ndarray(np.empty(shape, getattr(ml_dtypes, dtype, None) or dtype)))
    monkeypatch.setitem(sys.modules, "jax", jax)
    q, k, v = qkv()
    want, _ = kernel(q, k, v)
    fake.calls.clear()
    tensors = [ndarray(x) for x in (q, k, v)]
    out, lse = kernel(*tensors)
    np.testing.assert_array_equal(out.array, want)
    mine = driver.own_stream(0)
    assert tensors[1].streams == [mine] and out.streams == [mine] and fake.launches[-1].stream == mine
    assert fake.calls.index("cuStreamSynchronize") > fake.calls.index("cuLaunchKernelEx")
    assert chosen == ["cuda:0"] * 2
    with pytest.raises(InputError, match=r"^out: JAX arrays are immutable"):
        kernel(*tensors, out=out, lse=lse)


def test_other_exporters_bring_their_outputs(kernel: Kernel, fake: FakeCuda) -> None:
    q, k, v = qkv()
    want, want_lse = kernel(q, k, v)
    tensors = [Exporter(x) for x in (q, k, v)]
    with pytest.raises(InputError, match=r"^out: must be given: fagen cannot allocate a fake_cuda.Exporter"):
        kernel(*tensors)
    out, lse = np.empty_like(want), np.empty_like(want_lse)
    kernel(*tensors, out=Exporter(out), lse=Exporter(lse))
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(lse, want_lse)
    assert fake.launches[-1].stream == driver.LEGACY_STREAM == tensors[0].streams[-1]
    with pytest.raises(InputError, match=r"^k: is on cuda:1, q on cuda:0"):
        kernel(tensors[0], Exporter(k, (2, 1)), tensors[2])
    with pytest.raises(InputError, match=r"^q: is not in GPU memory \(DLPack device type 1\)"):
        kernel(Exporter(q, (1, 0)), *tensors[1:])
    with pytest.raises(InputError, match=r"^v: is fp16"):
        kernel(*tensors[:2], Exporter(v.view(np.float16)))


def test_an_exporter_that_fails_is_the_arguments_fault(kernel: Kernel) -> None:
    class Broken(Exporter):
        def __dlpack__(self, **options):
            raise BufferError("not today")

    q, k, v = qkv()
    with pytest.raises(InputError, match=r"^k: cannot be exported .*not today"):
        kernel(Exporter(q), Broken(k), Exporter(v))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "int8", "float32"])
@pytest.mark.parametrize("has_dtype", [True, False])
def test_types_that_cross_dlpack(dtype: str, has_dtype: bool) -> None:
    ours = {"float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "e4m3", "int8": "int8", "float32": "fp32"}[dtype]
    a = np.zeros((2, 3, 4, 64), getattr(ml_dtypes, dtype, None) or dtype)
    exporter = (exporter_of("some") if has_dtype else Exporter)(a)
    described, _ = exporter_framework(exporter).describe("q", exporter, 5)
    assert (described.shape, described.strides, described.ptr) == (a.shape, (768, 256, 64, 1), a.ctypes.data)
    if has_dtype or ours != "e4m3":
        assert described.dtype == ours
    else:  # the view has no word for e4m3, nor has the exporter
        assert described.dtype.startswith("of an unknown type")


@pytest.mark.parametrize(
    ("typestr", "ours"), [("<V2", "bf16"), ("|V1", "e4m3"), ("<f2", "fp16"), ("<f4", "fp32"), ("|i1", "int8"), ("<i4", "int32")]
)
def test_types_of_the_array_interface(typestr: str, ours: str) -> None:
    assert _dtype(object(), types.SimpleNamespace(dtype=np.dtype(typestr))) == ours


def test_numpy_arrays_that_cannot_take_results(kernel: Kernel) -> None:
    q, k, v = qkv()
    out = np.zeros((2, 5, 4, 64), BF16)
    out.flags.writeable = False
    with pytest.raises(InputError, match=r"^out: is read-only"):
        kernel(q, k, v, out=out)
    shared = np.lib.stride_tricks.as_strided(np.zeros((2, 5, 1, 64), BF16), (2, 5, 4, 64), (640, 128, 0, 2))
    with pytest.raises(InputError, match=r"^out: has elements that share memory"):
        kernel(q, k, v, out=shared)
    with pytest.raises(InputError, match=r"^q: is object"):
        kernel(q.astype(object), k, v)
    with pytest.raises(InputError, match=r"^lse: is float64"):
        kernel(q, k, v, lse=np.zeros((2, 4, 5)))


def test_stream_handles() -> None:
    protocol = type("Stream", (), {"__cuda_stream__": lambda self: (0, 0x44)})()
    assert [stream_handle(s) for s in (0, 7, types.SimpleNamespace(cuda_stream=8), types.SimpleNamespace(ptr=9), protocol)] == [
        0,
        7,
        8,
        9,
        0x44,
    ]
    for wrong in (True, "0", 1.5, object()):
        with pytest.raises(InputError, match=r"^stream: is a "):
            stream_handle(wrong)


def test_framework_names(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(monkeypatch)
    assert framework_of("q", Tensor(np.zeros(1))).name == "torch"
    assert framework_of("q", Exporter(np.zeros(1, np.float32))).name == "array"
    assert framework_of("q", np.zeros(1)) is None
    assert framework_of("q", type("Cai", (), {"__cuda_array_interface__": {}})()).name == "array"
