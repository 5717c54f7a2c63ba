"""`fagen.attention`: which kernel a call gets, how often one is compiled, and what a repeated call costs, on the fake driver."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_cuda import Exporter, FakeCuda, Tensor, attention_kernel, fake_torch, install

import fagen
from fagen import Attention, InputError, LaunchError, Schedule, attend, tuned
from fagen.launch import Kernel
from fagen.plan import assemble
from fagen.plan.kernel import Problem

BF16 = ml_dtypes.bfloat16
ROOT = Path(__file__).resolve().parents[2]


class Compiler:
    """Stands in for `fagen.compile`: plans without proof, and makes the fake device compute what the newest kernel computes."""

    def __init__(self, fake: FakeCuda):
        self.fake = fake
        self.asked: list[tuple[Attention, Schedule]] = []

    def __call__(self, attention: Attention, schedule: Schedule) -> Kernel:
        self.asked.append((attention, schedule))
        plan = assemble(attention, schedule)
        self.fake.kernel = attention_kernel(plan) if schedule.precision is None else None  # several kernels: no numbers
        return Kernel(plan, "// text", b"cubin", None)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch)


@pytest.fixture
def compiler(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    attend._torch_calls.clear()
    attend._calls.clear()
    attend._kernels.clear()
    compiler = Compiler(fake)
    monkeypatch.setattr(attend.api, "compile", compiler)
    yield compiler
    attend._torch_calls.clear()
    attend._calls.clear()
    attend._kernels.clear()


def qkv(batch=2, sq=5, sk=7, hq=4, hkv=2, d=64, dtype: Any = BF16, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(
        rng.standard_normal((batch, n, h, d)).astype(np.float32).astype(dtype) for n, h in ((sq, hq), (sk, hkv), (sk, hkv))
    )


# the name -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "before",
    [
        "",
        "import fagen.attention",
        "from fagen.attention import Attention",
        "fagen.attention",
        "import fagen.attend",
        "import fagen.api",
    ],
)
def test_attention_is_the_function_whatever_was_imported(before: str) -> None:
    code = f"import fagen\n{before}\nprint(type(fagen.attention).__name__, fagen.attention.__module__)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert answer.stdout.strip() == "function fagen.attend"


def test_the_module_can_still_be_imported_from() -> None:
    assert importlib.import_module("fagen.attention").Attention is Attention
    assert callable(fagen.attention)


# results ------------------------------------------------------------------------------------------------------------------


def test_numpy_in_numpy_out(compiler: Compiler) -> None:
    q, k, v = qkv()
    out, lse = fagen.attention(q, k, v, return_lse=True)
    want, want_lse = fagen.reference(Attention(head_dim=64), q, k, v)
    np.testing.assert_allclose(out.astype(np.float64), want, atol=0.02)
    np.testing.assert_allclose(lse, want_lse, atol=1e-4)
    alone = fagen.attention(q, k, v)
    assert alone.dtype == BF16 and np.array_equal(alone, out)
    assert len(compiler.asked) == 1


def test_scale_is_honoured(compiler: Compiler) -> None:
    q, k, v = qkv()
    out = fagen.attention(q, k, v, scale=1.5)
    want, _ = fagen.reference(Attention(head_dim=64, scale=1.5), q, k, v)
    np.testing.assert_allclose(out.astype(np.float64), want, atol=0.02)
    assert [a.scale for a, _ in compiler.asked] == [1.5]


def test_the_usual_scale_is_the_same_kernel_however_it_is_given(compiler: Compiler) -> None:
    q, k, v = qkv()
    for scale in (None, 0.125, np.float32(0.125), 64**-0.5):
        fagen.attention(q, k, v, scale=scale)
    assert len(compiler.asked) == 1


def test_causal_is_another_kernel(compiler: Compiler) -> None:
    q, k, v = qkv(sq=7)
    fagen.attention(q, k, v)
    fagen.attention(q, k, v, causal=True)
    assert [a.mask for a, _ in compiler.asked] == ["full", "causal"]


def test_outputs_of_the_caller_are_written(compiler: Compiler) -> None:
    q, k, v = qkv()
    out, lse = np.empty_like(q), np.empty((2, 4, 5), np.float32)
    got, got_lse = fagen.attention(q, k, v, out=out, lse=lse, return_lse=True)
    assert got is out and got_lse is lse
    assert np.isfinite(lse).all()


def test_e4m3_takes_the_fp8_schedule_its_descales_and_the_type_of_out(compiler: Compiler) -> None:
    q, k, v = qkv(d=128, dtype=ml_dtypes.float8_e4m3fn)
    plain = fagen.attention(q, k, v)
    scaled = fagen.attention(q, k, v, v_descale=2.0)
    assert plain.dtype == BF16
    np.testing.assert_allclose(scaled.astype(np.float32), 2 * plain.astype(np.float32), rtol=0.02)
    half = fagen.attention(q, k, v, out=np.empty(q.shape, np.float16))
    assert half.dtype == np.float16
    assert [(a.dtype, a.output_dtype) for a, _ in compiler.asked] == [("e4m3", "bf16"), ("e4m3", "fp16")]
    choices = [
        tuned.choose(a, Problem(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2]), tuned.H200) for a, _ in compiler.asked
    ]
    assert [s for _, s in compiler.asked] == [c.schedule for c in choices]
    assert all(c.entry is not None and c.entry.dtype == "e4m3" for c in choices)


def test_fp8_quantises_16_bit_tensors_and_takes_e4m3_ones_as_they_are(compiler: Compiler) -> None:
    for dtype, name in ((BF16, "bf16"), (np.float16, "fp16")):
        compiler.asked.clear()
        out = fagen.attention(*qkv(d=128, dtype=dtype), precision="fp8")
        ((attention, schedule),) = compiler.asked
        assert out.dtype == dtype and attention.dtype == name
        assert (schedule.precision, schedule.hadamard) == ("e4m3", True)
        choice = tuned.choose(attention.replace(dtype="e4m3", out_dtype=name), Problem(2, 5, 7, 4, 2))
        assert schedule == choice.schedule.replace(precision="e4m3", **tuned.QUANTISED)
    compiler.asked.clear()
    q, k, v = qkv(d=128, dtype=ml_dtypes.float8_e4m3fn)
    assert fagen.attention(q, k, v, precision="fp8", v_descale=2.0).dtype == BF16
    assert [s.precision for _, s in compiler.asked] == [None]


def test_int8_quantises_16_bit_tensors_and_takes_8_bit_ones_as_they_are(compiler: Compiler) -> None:
    for dtype, name in ((BF16, "bf16"), (np.float16, "fp16")):
        compiler.asked.clear()
        assert fagen.attention(*qkv(d=128, dtype=dtype), precision="int8").dtype == dtype
        ((attention, schedule),) = compiler.asked
        assert (attention.dtype, schedule.precision, schedule.hadamard) == (name, "int8", True)
    q, k, v = qkv(d=128, dtype=np.float32)
    q, k = (np.rint(x * 30).astype(np.int8) for x in (q, k))
    v = v.astype(ml_dtypes.float8_e4m3fn)
    compiler.asked.clear()
    for precision in (None, "int8"):
        scaled = {"q_descale": 1 / 30, "k_descale": 1 / 30}
        out, lse = fagen.attention(q, k, v, precision=precision, return_lse=True, **scaled)
        assert out.dtype == BF16
        ((attention, schedule),) = compiler.asked  # one kernel for both
        assert (attention.dtype, attention.value_dtype, schedule.precision) == ("int8", "e4m3", None)
        want, want_lse = fagen.reference(attention, q, k, v, **scaled)
        np.testing.assert_allclose(out.astype(float), want, rtol=2**-7, atol=1e-6)
        np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match=r"^v: is int8; this kernel reads e4m3"):
        fagen.attention(q, k, k)
    with pytest.raises(InputError, match=r"^precision: is 'fp8', but q is int8"):
        fagen.attention(q, k, v, precision="fp8")
    with pytest.raises(InputError, match=r"^precision: is 'int8', but q is e4m3"):
        fagen.attention(v, v, v, precision="int8")


def test_int8_qk_quantises_q_and_k_and_takes_int8_ones_beside_a_16_bit_v(compiler: Compiler) -> None:
    for dtype, name in ((BF16, "bf16"), (np.float16, "fp16")):
        compiler.asked.clear()
        assert fagen.attention(*qkv(d=128, dtype=dtype), precision="int8_qk").dtype == dtype
        ((attention, schedule),) = compiler.asked
        assert (attention.dtype, attention.v_dtype, schedule.precision, schedule.hadamard) == (name, None, "int8_qk", True)
    q, k, v = qkv(d=128, dtype=np.float32)
    q, k = (np.rint(x * 30).astype(np.int8) for x in (q, k))
    scaled = {"q_descale": 1 / 30, "k_descale": 1 / 30}
    for dtype, name in ((BF16, "bf16"), (np.float16, "fp16")):
        compiler.asked.clear()
        half = v.astype(dtype)
        for precision in (None, "int8_qk"):
            out, lse = fagen.attention(q, k, half, precision=precision, return_lse=True, **scaled)
            assert out.dtype == dtype, "that of v"
            ((attention, schedule),) = compiler.asked  # one kernel for both
            assert (attention.dtype, attention.v_dtype, schedule.precision) == ("int8", name, None)
            want, want_lse = fagen.reference(attention, q, k, half, **scaled)
            np.testing.assert_allclose(out.astype(float), want, rtol=2**-7, atol=1e-5)
            np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)
    other = fagen.attention(q, k, v.astype(np.float16), out=np.empty(q.shape, BF16), **scaled)
    assert other.dtype == BF16 and compiler.asked[-1][0].output_dtype == "bf16"
    fagen.attention(q, k, v.astype(ml_dtypes.float8_e4m3fn), **scaled)
    assert compiler.asked[-1][0].products == "int8", "the type of v tells one kernel from another"
    half = v.astype(BF16)
    for wrong in ("fp8", "int8"):
        with pytest.raises(InputError, match=rf"^precision: is '{wrong}', but q is int8 and v bf16: quantised tensors"):
            fagen.attention(q, k, half, precision=wrong)
    with pytest.raises(InputError, match=r"^precision: is 'int8_qk', but q is int8 and v e4m3"):
        fagen.attention(q, k, v.astype(ml_dtypes.float8_e4m3fn), precision="int8_qk")
    with pytest.raises(InputError, match=r"^v_descale: given beside a bf16 v"):
        fagen.attention(q, k, half, v_descale=1.0)


def test_16_bit_kernels_are_not_those_of_fp8(compiler: Compiler) -> None:
    q, k, v = qkv(d=128)
    for precision in (None, "fp8", None, "fp8"):
        fagen.attention(q, k, v, precision=precision)
    assert [s.precision for _, s in compiler.asked] == [None, "e4m3"]


@pytest.mark.parametrize(("sq", "sk"), [(0, 7), (5, 0)])
def test_empty_sizes(compiler: Compiler, fake: FakeCuda, sq: int, sk: int) -> None:
    q, k, v = qkv(sq=sq, sk=sk)
    out, lse = fagen.attention(q, k, v, return_lse=True)
    assert out.shape == (2, sq, 4, 64) and lse.shape == (2, 4, sq)
    assert len(fake.launches) == (sq > 0)
    assert not out.astype(np.float32).any() and (sq == 0 or np.isneginf(lse).all())


def test_one_real_compilation(fake: FakeCuda) -> None:
    attend._torch_calls.clear()
    attend._calls.clear()
    attend._kernels.clear()
    q, k, v = qkv(d=128, sq=64, sk=600)
    fagen.attention(q, k, v)
    (kernel,) = attend._kernels.values()
    assert kernel.cubin[:4] == b"\x7fELF" and not kernel.report.broken()
    assert kernel.plan.schedule == tuned.choose(Attention(head_dim=128), Problem(2, 64, 600, 4, 2)).schedule
    assert len(fake.launches) == 1
    attend._torch_calls.clear()
    attend._calls.clear()
    attend._kernels.clear()


# dispatch -----------------------------------------------------------------------------------------------------------------


def test_the_schedule_is_the_tables_choice_for_the_sizes(compiler: Compiler) -> None:
    for length in (512, 16384):
        fagen.attention(*qkv(1, 1, length, 1, 1, 256))
    sizes = [Problem(1, n, n, 1, 1) for n in (512, 16384)]
    assert [s for _, s in compiler.asked] == [tuned.choose(Attention(head_dim=256), p, tuned.H200).schedule for p in sizes]
    assert len({s for _, s in compiler.asked}) == 2, "the table tells them apart"
    fagen.attention(*qkv(1, 3, 14000, 2, 1, 256))  # other sizes of a bucket: the same kernel
    assert len(compiler.asked) == 2


def test_a_kernel_is_compiled_once_for_all_threads(compiler: Compiler) -> None:
    q, k, v = qkv()
    threads = [threading.Thread(target=fagen.attention, args=(q, k, v)) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(compiler.asked) == 1


def test_every_device_has_its_choice(monkeypatch: pytest.MonkeyPatch, compiler: Compiler) -> None:
    fake_torch(monkeypatch)
    q, k, v = (Tensor(x) for x in qkv())
    a100 = replace(fagen.driver.device_info(0), compute_capability=(8, 0), smem_bytes=163 << 10)
    monkeypatch.setattr(fagen.driver, "device_info", lambda index: a100)
    fagen.attention(q, k, v)
    assert compiler.asked[0][1].arch == "sm_80" and compiler.asked[0][1].mma == "mma_sync"


def test_a_device_that_no_schedule_is_for(compiler: Compiler, fake: FakeCuda) -> None:
    fake.compute_capability = (10, 0)
    with pytest.raises(LaunchError, match=r"no schedule runs on Fake GPU \(compute capability 10.0\)"):
        fagen.attention(*qkv())
    assert not compiler.asked


def test_torch_tensors_on_the_current_stream(monkeypatch: pytest.MonkeyPatch, compiler: Compiler, fake: FakeCuda) -> None:
    torch = fake_torch(monkeypatch, 0x70)
    a = qkv()
    q, k, v = (Tensor(x) for x in a)
    first = fagen.attention(q, k, v)
    again, _ = fagen.attention(q, k, v, return_lse=True)
    want, _ = fagen.reference(Attention(head_dim=64), *a)
    np.testing.assert_allclose(again.array.astype(np.float64), want, atol=0.02)
    assert np.array_equal(first.array, again.array)
    assert torch.allocated == 4, "a call allocates its two outputs and nothing else"
    assert {x.stream for x in fake.launches} == {0x70}
    fagen.attention(q, k, v, stream=0x99)
    assert fake.launches[-1].stream == 0x99


def test_a_captured_call_needs_a_warm_kernel(monkeypatch: pytest.MonkeyPatch, compiler: Compiler, fake: FakeCuda) -> None:
    fake_torch(monkeypatch, 0x70)
    q, k, v = (Tensor(x) for x in qkv())
    fake.capturing[0x70] = 1
    with pytest.raises(LaunchError, match="warm up first"):
        fagen.attention(q, k, v)
    fake.capturing.clear()
    fagen.attention(q, k, v)
    fake.capturing[0x70] = 2
    before = list(fake.calls)
    fagen.attention(q, k, v)
    during = fake.calls[len(before) :]
    assert "cuLaunchKernelEx" in during
    assert not {"cuModuleLoadData", "cuMemAlloc", "cuStreamSynchronize"} & set(during)
    assert len(compiler.asked) == 1


def test_an_exporter_without_shape_or_dtype(compiler: Compiler) -> None:
    a = qkv()
    q, k, v = (Exporter(x) for x in a)
    out, lse = np.empty_like(a[0]), np.empty((2, 4, 5), np.float32)
    for _ in range(2):
        fagen.attention(q, k, v, out=Exporter(out), lse=Exporter(lse))
    want, _ = fagen.reference(Attention(head_dim=64), *a)
    np.testing.assert_allclose(out.astype(np.float64), want, atol=0.02)
    assert len(compiler.asked) == 1


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch, compiler: Compiler) -> None:
    monkeypatch.setattr(attend, "MAX_CALLS", 3)
    for sk in range(1, 9):
        fagen.attention(*qkv(sk=sk))
    assert len(attend._calls) == 3 and len(compiler.asked) == 1


# mistakes -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[0], k, v), r"^q: has 3 dimensions"),
        (lambda q, k, v: (q.astype(np.float32), k, v), r"^q: is fp32; there are kernels for bf16, fp16, e4m3"),
        (lambda q, k, v: (q, k.astype(np.float16), v), r"^k: is fp16; this kernel reads bf16"),
        (lambda q, k, v: (np.repeat(q, 2, 3)[..., :80], k, v), r"^q: has head_dim 80; there are kernels for 64, 128, 256"),
        (lambda q, k, v: (q, k, v[:, :3]), r"^v: has seqlen_k 3, but k's is 7"),
        (lambda q, k, v: (q[:, :, :3], k, v), r"^k: has 2 KV heads; q's 3 heads are not a multiple"),
        (lambda q, k, v: (q.tolist(), k, v), r"^q: is a list; expected a torch, CuPy or JAX tensor"),
        (lambda q, k, v: (q, None, v), r"^k: is a NoneType"),
    ],
)
def test_mistakes_are_named_before_anything_is_compiled(compiler: Compiler, change: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        fagen.attention(*change(*qkv()))
    assert not compiler.asked


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 0.0}, r"^scale: is 0.0; expected a number from 1e-30 to 256"),
        ({"scale": float("nan")}, r"^scale: is nan"),
        ({"scale": "x"}, r"^scale: is a str; expected a number"),
        ({"scale": 10**400}, r"^scale: is inf; expected a number"),
        ({"scale": True}, r"^scale: is a bool; expected a number"),
        ({"causal": "yes"}, r"^causal: is a str; expected True or False"),
        ({"out": np.empty((2, 5, 4, 32), BF16)}, r"^out: has shape"),
        ({"q_descale": 2.0}, r"^q_descale: given with bf16 inputs"),
        ({"precision": "e4m3"}, r"^precision: is 'e4m3'; expected None, 'fp8' or 'int8'"),
        ({"precision": ["fp8"]}, r"^precision: is \['fp8'\]"),
    ],
)
def test_wrong_options_are_named(compiler: Compiler, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fagen.attention(*qkv(), **options)


@pytest.mark.parametrize(("good", "bad"), [({"causal": True}, {"causal": 1}), ({"scale": 1.0}, {"scale": True})])
def test_wrong_options_are_named_after_an_equal_right_one(compiler: Compiler, good: dict[str, Any], bad: dict[str, Any]) -> None:
    """True and 1 are the same key of a dict."""
    fagen.attention(*qkv(), **good)
    with pytest.raises(InputError, match=f"^{next(iter(bad))}: is a "):
        fagen.attention(*qkv(), **bad)


def test_libraries_are_not_mixed(monkeypatch: pytest.MonkeyPatch, compiler: Compiler) -> None:
    fake_torch(monkeypatch)
    q, k, v = qkv()
    with pytest.raises(InputError, match=r"^k: is a NumPy array, q a torch one"):
        fagen.attention(Tensor(q), k, v)


def test_no_gpu_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> Any:
        raise LaunchError("no GPU: the CUDA driver sees no device")

    monkeypatch.setattr(fagen.driver, "api", absent)
    with pytest.raises(LaunchError, match=r"^no GPU: "):
        fagen.attention(*qkv())
