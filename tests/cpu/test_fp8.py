"""fa3_fp8: the order of keys in P and in the transposed V, proven on the emitted CUDA; launches with descales; mutants."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_cuda import Device, Exporter, FakeCuda, Tensor, attention_kernel, exporter_of, fake_torch, install, read_arguments
from fp8_steps import PAPER_FP8

import fagen
from fagen import Attention, InputError, InternalError, driver
from fagen.arguments import BoundCall
from fagen.compile import build
from fagen.emit import emit
from fagen.launch import Kernel
from fagen.library import load
from fagen.oracle import make_descales, make_inputs, reference, transpose_v
from fagen.plan import Plan, Problem, assemble
from fagen.plan.kernel import DESCALES
from fagen.plan.layout import A64_E4M3, A64_E4M3PERM, ACC64, KEY_ORDER, Layout, swizzle
from fagen.plan.mutants import run_mutants

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def fp8(**changes: Any) -> Plan:
    return assemble(*load(PAPER_FP8, **changes))


# The emitted helpers, run in Python: the few C expressions they consist of are taken from the text --------------------------------


def helper(p: Plan, name: str) -> str:
    """The text of a device function of the emitted kernel."""
    text = emit(p, "kernel").text
    begin = text.index(f" {name}(")
    return text[begin : text.index("\n}\n", begin)]


def expression(text: str, what: str) -> str:
    """The expression assigned to a variable of a helper."""
    (found,) = re.findall(rf"\b{what} = ([^;]*?)(?:, odd = |;)", text)
    return str(found)


def evaluate(c: str, **env: Any) -> int:
    """A C expression of non-negative ints: + - * / % ^ comparisons, and conditionals, which stand alone or in parentheses."""
    ternary = r"([^()?]+)\?([^()?:]+):([^()?]+)"
    python = re.sub(rf"\({ternary}\)", r"((\2) if (\1) else (\3))", c)
    python = re.sub(rf"^{ternary}$", r"(\2) if (\1) else (\3)", python)
    assert "?" not in python, c
    return int(eval(python.replace("/", "//"), {"__builtins__": {}}, env))


def byte_perm(a: list[Any], b: list[Any], selector: int) -> list[Any]:
    """PTX prmt on registers that are lists of four bytes."""
    return [[*a, *b][selector >> 4 * n & 7] for n in range(4)]


def ldmatrix_trans(memory: dict[int, Any], addresses: list[int]) -> list[list[list[Any]]]:
    """PTX 9.7.14.5.15, .x4.trans: [lane][matrix] → the register's four bytes. Lane 8i + r gives the address of row r of matrix i; lane t
    gets elements (2 (t % 4), t / 4) and the one below it."""
    registers: list[list[list[Any]]] = [[] for _ in range(32)]
    for lane in range(32):
        for matrix in range(4):
            rows = [addresses[8 * matrix + 2 * (lane % 4) + n] for n in range(2)]
            registers[lane].append([memory[row + 2 * (lane // 4) + half] for row in rows for half in range(2)])
    return registers


def stmatrix(memory: dict[int, Any], addresses: list[int], registers: list[list[list[Any]]]) -> None:
    """PTX 9.7.14.5.16, .x4: row r of matrix i, at the address that lane 8i + r gives, comes from lanes 4r … 4r + 3."""
    for matrix in range(4):
        for row in range(8):
            values = [byte for lane in range(4 * row, 4 * row + 4) for byte in registers[lane][matrix]]
            for n, byte in enumerate(values):
                assert addresses[8 * matrix + row] + n not in memory, "written twice"
                memory[addresses[8 * matrix + row] + n] = byte


def transpose(p: Plan, groups: list[list[int]]) -> dict[int, Any]:
    """Shared memory after the emitted transpose_v of every warp has run on a tile of V as TMA leaves it: byte → (key, column). `groups` gets
    the 16-byte bank group of each row of every 8 × 8 matrix loaded or stored."""
    kernel = p.kernels[0]
    raw = kernel.smem_of("V_raw")
    memory = {swizzle(key, c, raw.rows, raw.chunk_bytes): (key, c) for key in range(raw.rows) for c in range(raw.cols)}
    stored: dict[int, Any] = {}
    text = helper(p, "transpose_v")
    even, odd, column, source, target = (expression(text, x) for x in ("even", r"odd", "column", "from", "to"))
    (load,) = re.findall(r"ldmatrix_trans\(v\[i\], (.*?)\);", text)
    (store,) = re.findall(r"stmatrix\((.*?), __byte_perm\(v\[i\]\[0\], v\[i\]\[1\], even\),", text)
    order = re.findall(r"__byte_perm\(v\[i\]\[(\d)\], v\[i\]\[(\d)\], (even|odd)\)", text)
    (strips, step) = re.findall(r"strip < (\d+); strip \+= (\d+)", text)[0]
    units, at_once = (int(n) for n in re.findall(r"unit < (\d+); unit \+= (\d+)", text)[0])
    assert text.count(f"if (unit + i < {units})") == 2 and set(re.findall(r"[^+] i < (\d+)", text)) == {str(at_once)}
    lanes: list[dict[str, int]] = [{"lane": n, "r": n % 8, "matrix": n // 8} for n in range(32)]
    assert "const int lane = threadIdx.x % 32, r = lane % 8, matrix = lane / 8;" in text
    for env in lanes:
        env |= {n: evaluate(e, **env) for n, e in (("even", even), ("odd", odd), ("column", column))}
    (transposer,) = [r for r in kernel.roles if r.name == "transposer"]
    for warp in range(transposer.count):
        for strip in range(warp, int(strips), int(step)):
            for env in lanes:
                env |= {"raw": 0, "turned": 0, "strip": strip}
                env |= {"from_": evaluate(source, **env), "to": evaluate(target, **env)}
            for unit in range(0, units, at_once):
                for i in range(min(at_once, units - unit)):
                    for env in lanes:
                        env |= {"unit": unit, "i": i}
                    addresses = [evaluate(load.replace("from", "from_"), **env) for env in lanes]
                    v = ldmatrix_trans(memory, addresses)
                    out = [
                        [byte_perm(v[n][int(a)], v[n][int(b)], lanes[n][which]) for a, b, which in order] for n in range(len(lanes))
                    ]
                    targets = [evaluate(store, **env) for env in lanes]
                    stmatrix(stored, targets, out)
                    for rows in (addresses, targets):
                        groups += [[a // 16 % 8 for a in rows[8 * m : 8 * m + 8]] for m in range(4)]
    return stored


TILES = [(64, 32), (64, 96), (64, 160), (64, 192), (128, 32), (128, 128), (128, 160), (128, 224), (256, 32), (256, 96), (256, 128)]


@pytest.mark.parametrize("head_dim, tile_kv", TILES)
def test_the_transposed_v_has_its_keys_in_the_order_of_p(head_dim: int, tile_kv: int) -> None:
    """The emitted transposition, followed byte by byte; every row of a matrix in a bank group of its own."""
    groups: list[list[int]] = []
    p = fp8(head_dim=head_dim, tile_kv=tile_kv, tile_q=128, consumers=2, overlap="none")
    stored = transpose(p, groups)
    for column in range(head_dim):
        for at in range(tile_kv):
            assert stored[swizzle(column, at, head_dim)] == (at // 16 * 16 + KEY_ORDER[at % 16], column)
    assert len(stored) == head_dim * tile_kv, "and nothing else is written"
    assert all(sorted(g) == list(range(8)) for g in groups)


@pytest.mark.parametrize("stages", [(3, 2), (2, 3)], ids=str)
def test_warps_that_transpose_do_not_spill_beside_two_rings(stages: tuple[int, int]) -> None:
    """With a ring of tile numbers as well, three of these six units at once were too many."""
    p = fagen.plan(*load(PAPER_FP8, head_dim=64, tile_q=128, consumers=2, tile_kv=192, overlap="within", stages=stages))
    assert build(p, emit(p)).report.broken() == ()


def test_a_wrong_byte_permutation_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    p = fp8(head_dim=64, tile_kv=32, tile_q=128, consumers=2)
    honest = helper(p, "transpose_v")
    for right, other in (
        ("0x6420 : 0x7531", "0x7531 : 0x6420"),
        ("(matrix / 2)", "(matrix % 2)"),
        ("r < 4 : r >= 4", "r >= 4 : r < 4"),
    ):
        wrong = honest.replace(right, other)
        assert wrong != honest
        monkeypatch.setattr(f"{__name__}.helper", lambda p, name, text=wrong: text)
        with pytest.raises(AssertionError):
            stored = transpose(p, [])
            assert all(stored[swizzle(c, at, 64)] == (at // 16 * 16 + KEY_ORDER[at % 16], c) for c in range(64) for at in range(32))


def ptx_a_fragment(thread: int, i: int) -> tuple[int, int]:
    """wgmma.m64nNk32, A of 8-bit values in registers (PTX 9.7.15, its figure written out again); k32 steps side by side."""
    warp, lane = divmod(thread, 32)
    step, i = divmod(i, 16)
    row = lane // 4 + (8 if i // 4 in (1, 3) else 0)
    return 16 * warp + row, 32 * step + lane % 4 * 4 + i % 4 + (16 if i >= 8 else 0)


@pytest.mark.parametrize("thread", range(0, 128, 5))
def test_the_permuted_operand_is_the_operand_with_keys_in_key_order(thread: int) -> None:
    assert sorted(KEY_ORDER) == list(range(16))
    for i in range(112):
        row, column = A64_E4M3.coord(thread, i)
        assert (row, column) == ptx_a_fragment(thread, i)
        assert A64_E4M3PERM.coord(thread, i) == (row, column // 16 * 16 + KEY_ORDER[column % 16])


def packed_without_exchange(text: str, n: int) -> list[list[list[tuple[int, int]]]]:
    """[thread][register] → (row, column) of its four bytes, as the emitted pack fills P from the accumulator."""
    stores = re.findall(r"p\[(.*?)\] = pack_e4m3\((.*?)\);", text)
    p: list[list[Any]] = [[None] * (n // 4) for _ in range(128)]
    for thread in range(128):
        for i in range(n // 8):
            for register, values in stores:
                elements = [evaluate(x, i=i) for x in re.findall(r"s\[(.*?)\]", values)]
                p[thread][evaluate(register, i=i)] = [ACC64.coord(thread, e) for e in elements]
    return p


def packed_with_exchange(text: str, n: int) -> list[list[list[tuple[int, int]]]]:
    half, own = expression(text, "half"), expression(text, "own")
    (packed,) = re.findall(r"mine = pack_e4m3\((.*?)\);", text)
    sources = re.findall(r"__shfl_sync\(~0u, mine, (.*?), 4\)", text)
    (register,) = re.findall(r"p\[(.*?)\] = __byte_perm\(low, high, half\)", text)
    p: list[list[Any]] = [[None] * (n // 4) for _ in range(128)]
    for i in range(n // 8):
        for r in range(2):
            first = evaluate(own.replace("s + ", ""), i=i, r=r)
            at = [first + int(x) for x in re.findall(r"own\[(\d)\]", packed)]
            mine = [[ACC64.coord(thread, e) for e in at] for thread in range(128)]
            for thread in range(128):
                q = thread % 4
                low, high = (mine[thread // 4 * 4 + evaluate(s, q=q)] for s in sources)
                p[thread][evaluate(register, i=i, r=r)] = byte_perm(low, high, evaluate(half, q=q))
    return p


@pytest.mark.parametrize("tile_kv", [32, 96, 224])
@pytest.mark.parametrize(
    "v_transposed, follow, layout", [(False, packed_without_exchange, A64_E4M3PERM), (True, packed_with_exchange, A64_E4M3)]
)
def test_p_is_packed_into_the_layout_that_the_plan_names(
    v_transposed: bool, follow: Callable[[str, int], Any], layout: Layout, tile_kv: int
) -> None:
    plan = fp8(v_transposed=v_transposed, tile_kv=tile_kv)
    (frag,) = [f for r in plan.kernels[0].roles for f in r.frags if f.name == "P"]
    assert frag.layout == layout.name
    p = follow(helper(plan, "pack"), tile_kv // 2)
    for thread in range(128):
        for register, held in enumerate(p[thread]):
            assert held == [layout.coord(thread, 4 * register + n) for n in range(4)]


# launching ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    return fake_torch(monkeypatch)


def make(fake: FakeCuda, **changes: Any) -> Kernel:
    p = fp8(head_dim=64, **changes)
    fake.kernel = attention_kernel(p)
    return Kernel(p, "// text", b"cubin", None)


PROBLEM = Problem(3, 5, 7, 4, 2)


def inputs(kernel: Kernel, problem: Problem = PROBLEM) -> tuple[Any, Any, Any]:
    return make_inputs(kernel.plan.attention, problem)


def close(kernel: Kernel, out: Any, lse: Any, q: Any, k: Any, v: Any, **descales: Any) -> None:
    want, want_lse = reference(kernel.plan.attention, q, k, v, **descales)
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=2**-7, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("out_dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("v_transposed", [False, True])
@pytest.mark.parametrize("sk", [7, 16, 1, 0])
def test_numpy_with_descales(sk: int, v_transposed: bool, out_dtype: str, fake: FakeCuda) -> None:
    """Rows of a V given transposed may have any length: they are copied, and padded on the way."""
    kernel = make(fake, v_transposed=v_transposed, out_dtype=out_dtype)
    q, k, v = inputs(kernel, Problem(3, 5, sk, 4, 2))
    given = np.ascontiguousarray(v.transpose(0, 2, 3, 1)) if v_transposed else v
    scales = make_descales(PROBLEM)
    for descales in ({}, scales, {"v_descale": -2.0}, {**scales, "q_descale": np.float32(0.5)}, {"k_descale": np.array(3)}):
        out, lse = kernel(q, k, given, **descales)
        assert out.dtype == {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}[out_dtype]
        close(kernel, out, lse, q, k, v, **descales)
    assert not [m for m in fake.memory.values() if len(m) < 1 << 20], "the copies are freed"


@pytest.mark.parametrize("layout", ["contiguous", "fused", "transposed", "strided_k"])
@pytest.mark.parametrize("v_transposed", [False, True])
def test_torch_with_descales_of_any_strides(layout: Any, v_transposed: bool, fake: FakeCuda, torch: Any) -> None:
    kernel = make(fake, v_transposed=v_transposed)
    q, k, v = inputs(kernel)
    given = transpose_v(v, layout) if v_transposed else v
    tensors = [Tensor(x) for x in (q, k, given)]
    for seed in (0, 1):  # the second call finds everything prepared
        scales = make_descales(PROBLEM, seed=seed, layout=layout)
        out, lse = kernel(*tensors, **{n: Tensor(x) for n, x in scales.items()})
        close(kernel, out.array, lse.array, q, k, v, **scales)
    assert len(kernel._bound) == len(kernel._torch_calls) == 1
    out, lse = kernel(*tensors)
    close(kernel, out.array, lse.array, q, k, v)
    zero = np.broadcast_to(np.float32(2), (3, 2))
    out, lse = kernel(*tensors, k_descale=Tensor(zero))
    close(kernel, out.array, lse.array, q, k, v, k_descale=2.0)


def test_numbers_need_no_new_binding_and_do_not_stay(fake: FakeCuda, torch: Any) -> None:
    kernel = make(fake)
    q, k, v = inputs(kernel)
    tensors = [Tensor(x) for x in (q, k, v)]
    array = make_descales(PROBLEM)["q_descale"]
    for descales in (
        {"q_descale": 0.5},
        {"q_descale": 0.25, "v_descale": 3},
        {},
        {"k_descale": 2.0},
        {"q_descale": array, "v_descale": 2.0},
    ):
        given = {n: Tensor(x) if isinstance(x, np.ndarray) else x for n, x in descales.items()}
        out, lse = kernel(*tensors, **given)
        close(kernel, out.array, lse.array, q, k, v, **descales)
    assert len(kernel._bound) == 2, "with and without the array"
    fake.calls.clear()
    fake.contexts.append(0xC0)
    kernel(*tensors, q_descale=0.125)
    assert not set(fake.calls) & {"cuTensorMapEncodeTiled", "cuMemAlloc", "cuMemcpyHtoDAsync", "cuStreamSynchronize"}
    assert fake.calls.count("cuLaunchKernelEx") == 1


def test_what_the_kernel_receives(fake: FakeCuda, torch: Any) -> None:
    """Head 64 in e4m3: rows of 64 bytes, for which TMA has another swizzle than for V's keys; null pointers beside numbers."""
    seen: list[Any] = []
    for changes in ({}, {"v_transposed": True}, {"head_dim": 128}):
        p = assemble(*load(PAPER_FP8, **{"head_dim": 64, **changes}))
        kernel = Kernel(p, "", b"", None)
        q, k, v = make_inputs(p.attention, PROBLEM)
        fake.kernel = lambda params, plan=p: seen.append(read_arguments(plan.kernels[0], params))
        array = Tensor(make_descales(PROBLEM)["k_descale"])
        given = transpose_v(v) if p.schedule.v_transposed else v
        kernel(Tensor(q), Tensor(k), Tensor(given), q_descale=0.5, k_descale=array)
        maps, params = seen[-1]
        swizzles = {n: (m[10], m[15]) for n, m in maps.items()}  # (bytes of the box's rows, CUtensorMapSwizzle)
        narrow, wide = (64, 2), (128, 3)
        assert swizzles == {
            "q": narrow if p.attention.head_dim == 64 else wide,
            "k": narrow if p.attention.head_dim == 64 else wide,
            "v": wide if p.schedule.v_transposed or p.attention.head_dim == 128 else narrow,
        }
        assert (params.q_descale, params.k_descale, params.v_descale) == (0, array.data_ptr(), 0)
        assert (params.q_descale_value, params.k_descale_value, params.v_descale_value) == (0.5, 1.0, 1.0)
        assert (params.k_descale_sb, params.k_descale_sh) == (2, 1)


def test_a_box_without_a_swizzle_is_our_fault(fake: FakeCuda) -> None:
    with pytest.raises(InternalError, match="rows of 32 bytes"):
        driver.TensorMapEncoder("bf16", (16, 8, 1, 1, 1), (32, 32, 32, 32), (16, 8, 1, 1, 1))


def test_zero_descales_give_the_mean_and_zero(fake: FakeCuda) -> None:
    kernel = make(fake)
    q, k, v = inputs(kernel)
    out, lse = kernel(q, k, v, q_descale=0)
    mean = np.repeat(v.astype(np.float64).mean(axis=1, keepdims=True), 2, axis=2)
    np.testing.assert_allclose(out.astype(float), np.broadcast_to(mean, out.shape), rtol=2**-7, atol=1e-6)
    np.testing.assert_allclose(lse, np.log(7), rtol=1e-6)
    assert not kernel(q, k, v, v_descale=0.0)[0].astype(float).any()
    zeros = np.zeros((3, 2), np.float32)
    tiny = np.float32(2.0**-100)  # what quantising zeros gives; the product of two is 0 in float32
    for given in ({"k_descale": zeros}, {"q_descale": 0, "k_descale": zeros}, {"q_descale": tiny, "k_descale": tiny}):
        again, lse = kernel(q, k, v, **given)
        assert np.array_equal(again, out), "a masked score is −inf, and 0 · −inf would be NaN"
        np.testing.assert_allclose(lse, np.log(7), rtol=1e-6)


@pytest.mark.parametrize("kind", [Exporter, exporter_of("somewhere")], ids=["without a dtype", "with a dtype"])
def test_any_exporter_of_dlpack(kind: Any, fake: FakeCuda) -> None:
    """The tensors say that they are e4m3; what their descales are, DLPack's type code tells as well."""
    kernel = make(fake)
    q, k, v = inputs(kernel)
    scales = make_descales(PROBLEM, layout="transposed")
    out, lse = (kind(np.empty(s, t)) for s, t in (((3, 5, 4, 64), ml_dtypes.bfloat16), ((3, 4, 5), np.float32)))
    kernel(*(exporter_of("somewhere")(x) for x in (q, k, v)), out=out, lse=lse, **{n: kind(x) for n, x in scales.items()})
    close(kernel, out.array, lse.array, q, k, v, **scales)


# refusals -----------------------------------------------------------------------------------------------------------------------

GOOD = make_descales(PROBLEM)["q_descale"]
WRONG = [
    ({"q_descale": float("nan")}, "q_descale", "is nan; a descale is a finite float32 number"),
    ({"v_descale": np.float32("nan")}, "v_descale", "is nan"),
    ({"k_descale": float("inf")}, "k_descale", "is inf"),
    ({"v_descale": 10**400}, "v_descale", "is too large; a descale is a finite float32 number"),
    ({"k_descale": 1e39}, "k_descale", r"is 1e\+39; a descale is a finite float32 number"),
    ({"q_descale": -2}, "q_descale", "is -2; a negative descale of q would turn every row's largest score into its smallest"),
    ({"k_descale": -0.5}, "k_descale", "is -0.5; a negative descale of k"),
    ({"q_descale": True}, "q_descale", "is a bool"),
    ({"q_descale": "0.5"}, "q_descale", "is a str"),
    ({"q_descale": [1.0]}, "q_descale", "is a list"),
    ({"q_descale": GOOD[:, :1]}, "q_descale", r"has shape \(3, 1\); expected \(3, 2\) \(batch, kv_heads\), or one number"),
    ({"v_descale": GOOD[0]}, "v_descale", r"has shape \(2,\); expected \(3, 2\)"),
    ({"v_descale": np.repeat(GOOD, 2, 1)}, "v_descale", r"has shape \(3, 4\); expected \(3, 2\)"),
    ({"k_descale": GOOD.astype(np.float64)}, "k_descale", "is float64; a descale is fp32"),
    ({"k_descale": GOOD.astype(E4M3)}, "k_descale", "is e4m3; a descale is fp32"),
]


@pytest.mark.parametrize("descales, argument, text", WRONG)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_wrong_descales_are_named(
    library: str, descales: dict[str, Any], argument: str, text: str, fake: FakeCuda, torch: Any
) -> None:
    kernel = make(fake)
    tensors = inputs(kernel)
    wrap = Tensor if library == "torch" else np.asarray
    given = {n: wrap(x) if isinstance(x, np.ndarray) and x.ndim else x for n, x in descales.items()}
    tensors = tuple(wrap(x) for x in tensors)
    kernel(*tensors, **{argument: 1.0})  # also when a call with a number has been prepared
    with pytest.raises(InputError, match=text) as error:
        kernel(*tensors, **given)
    assert error.value.argument == argument and len(fake.launches) == 1


@pytest.mark.parametrize("wrong", [10**400, [[1.0], [1.0, 2.0]], "x", object()], ids=["large", "ragged", "text", "object"])
def test_the_oracle_names_a_descale_that_is_no_array(wrong: Any) -> None:
    q, k, v = (np.zeros((1, 4, 2, 64), E4M3) for _ in range(3))
    with pytest.raises(InputError, match=r"^k_descale: "):
        reference(Attention(head_dim=64, dtype="e4m3"), q, k, v, k_descale=wrong)


def test_values_of_a_numpy_array_are_checked(fake: FakeCuda) -> None:
    kernel = make(fake)
    for name, value in (("q_descale", -1), ("k_descale", np.nan), ("v_descale", np.inf)):
        bad = GOOD.copy()
        bad[2, 1] = value
        with pytest.raises(InputError, match=rf"{name}: is {float(value)} at \(2, 1\); a descale of {name[0]} is finite"):
            kernel(*inputs(kernel), **{name: bad})
    out, _ = kernel(*inputs(kernel), v_descale=-GOOD)
    assert np.isfinite(out.astype(float)).all()


def test_a_scalar_tensor_is_not_a_number(fake: FakeCuda, torch: Any) -> None:
    """Reading it would make the call wait for the GPU."""
    kernel = make(fake)
    with pytest.raises(InputError, match=r"^v_descale: has shape \(\); expected \(3, 2\)"):
        kernel(*(Tensor(x) for x in inputs(kernel)), v_descale=Tensor(np.array(0.5, np.float32)))


def test_descales_of_another_library_or_device(fake: FakeCuda, torch: Any) -> None:
    kernel = make(fake)
    tensors = [Tensor(x) for x in inputs(kernel)]
    for descale, text in (
        (GOOD, "is a NumPy array, q a torch one"),
        (Tensor(GOOD, Device("cpu", None)), "on cpu; move it to a GPU"),
        (Tensor(GOOD, Device("cuda", 1)), "is on cuda:1, q on cuda:0"),
    ):
        with pytest.raises(InputError, match=rf"^k_descale: .*{text}"):
            kernel(*tensors, k_descale=descale)
    misaligned = np.frombuffer(b"\0" * 2 + GOOD.tobytes(), np.uint8)[2:].view(np.float32).reshape(GOOD.shape)
    if misaligned.ctypes.data % 4:
        with pytest.raises(InputError, match=r"^k_descale: its data begins at"):
            kernel(*tensors, k_descale=Tensor(misaligned))


@pytest.mark.parametrize("name", ["fa2", "fa3"])
@pytest.mark.parametrize("descale", [1.0, GOOD])
def test_descales_with_16_bit_inputs(name: str, descale: Any, fake: FakeCuda) -> None:
    a, s = load(name, head_dim=64)
    q, k, v = make_inputs(a, PROBLEM)
    calls: list[Callable[..., Any]] = [
        Kernel(assemble(a, s), "", b"", None),
        lambda *x, **d: fagen.simulate(a, s, *x, **d),
        lambda *x, **d: fagen.reference(a, *x, **d),
    ]
    for call in calls:
        for argument in DESCALES:
            with pytest.raises(
                InputError, match=rf"^{argument}: given with bf16 inputs; only e4m3 and int8 tensors have a descale"
            ):
                call(q, k, v, **{argument: descale})


def test_the_other_layout_of_v_is_named(fake: FakeCuda, torch: Any) -> None:
    plain, transposed = make(fake), make(fake, v_transposed=True)
    q, k, v = inputs(plain)
    turned = transpose_v(v)
    for wrap in (np.asarray, Tensor):
        with pytest.raises(
            InputError,
            match=r"^v: has shape \(3, 7, 2, 64\); this kernel needs V transposed: \(batch, kv_heads, head_dim_v, seqlen_k\) = \(3, 2, 64, 7\)",
        ):
            transposed(wrap(q), wrap(k), wrap(v))
        with pytest.raises(
            InputError, match=r"^v: has shape \(3, 2, 64, 7\); this kernel takes V as \(batch, seqlen_k, kv_heads, head_dim_v\)"
        ):
            plain(wrap(q), wrap(k), wrap(turned))
    for call in (transposed, lambda *x: fagen.simulate(transposed.plan.attention, transposed.plan.schedule, *x)):
        with pytest.raises(InputError, match=r"^v: .* seqlen_k"):
            call(q, k, v)
    with pytest.raises(
        InputError, match=r"^v: has shape \(3, 2, 64, 7\), transposed; needs \(batch, seqlen_k, kv_heads, head_dim_v\)"
    ):
        fagen.reference(plain.plan.attention, q, k, turned)
    with pytest.raises(
        InputError,
        match=r"^v: head_dim_v has stride 7, 7 bytes; it must be a multiple of 16 .* allocate the rows of seqlen_k 7 longer",
    ):
        transposed(Tensor(q), Tensor(k), Tensor(np.ascontiguousarray(turned)))
    with pytest.raises(InputError, match=r"^v: the last dimension has stride"):
        transposed(Tensor(q), Tensor(k), Tensor(v.transpose(0, 2, 3, 1)))


def test_a_bound_call_checks_the_addresses_of_descales(fake: FakeCuda) -> None:
    p = fp8(head_dim=64, parallelism="persistent_static")
    strides = dict.fromkeys(("q", "k", "v", "out"), (5 * 256, 256, 64))
    call = BoundCall(p, p.bind(Problem(1, 5, 5, 4, 4), strides, 132), 0, (1,), None)
    call.run((256, 512, 768, 1024, 1280), 9, (1024, 0, 4))
    with pytest.raises(InputError, match=r"^v_descale: its data begins at 0x6, 2 bytes past a multiple of 4"):
        call.run((256, 512, 768, 1024, 1280), 9, (0, 0, 6))


# the simulator --------------------------------------------------------------------------------------------------------------------


def test_the_layout_of_v_changes_the_same_numbers_only() -> None:
    """Given transposed or transposed in the kernel: the simulator does not know the order of keys inside a product."""
    a, s = load(PAPER_FP8, head_dim=64, mask="causal")
    q, k, v = make_inputs(a, Problem(2, 200, 331, 4, 2))
    scales = make_descales(Problem(2, 200, 331, 4, 2))
    plain = fagen.simulate(a, s, q, k, v, **scales)
    turned = fagen.simulate(a, s.replace(v_transposed=True), q, k, transpose_v(v), **scales)
    assert all(np.array_equal(x, y) for x, y in zip(plain, turned))


def test_a_missing_descale_is_one_and_zero_is_zero() -> None:
    a, s = load(PAPER_FP8, head_dim=64)
    q, k, v = make_inputs(a, Problem(2, 70, 203, 4, 2))
    plain = fagen.simulate(a, s, q, k, v)
    ones = fagen.simulate(a, s, q, k, v, q_descale=1, k_descale=np.ones((2, 2), np.float32), v_descale=1.0)
    assert all(np.array_equal(x, y) for x, y in zip(plain, ones))
    out, lse = fagen.simulate(a, s, q, k, v, q_descale=np.zeros((2, 2), np.float32))
    mean = np.repeat(v.astype(np.float64).mean(axis=1, keepdims=True), 2, axis=2)
    np.testing.assert_allclose(out.astype(float), np.broadcast_to(mean, out.shape), rtol=2**-7, atol=1e-3)
    np.testing.assert_allclose(lse, np.log(203), rtol=1e-6)


def test_descales_of_the_oracle_are_checked() -> None:
    a, s = load(PAPER_FP8, head_dim=64)
    q, k, v = make_inputs(a, PROBLEM)
    for call in (lambda **d: fagen.simulate(a, s, q, k, v, **d), lambda **d: fagen.reference(a, q, k, v, **d)):
        with pytest.raises(InputError, match=r"q_descale: has shape \(2, 3\); expected \(3, 2\)"):
            call(q_descale=GOOD.T)
        with pytest.raises(InputError, match="k_descale: is nan"):
            call(k_descale=float("nan"))
        with pytest.raises(TypeError):
            call(p_descale=1.0)


# mutants --------------------------------------------------------------------------------------------------------------------------

MUTATED: dict[str, dict[str, Any]] = {
    "as built in": {},
    "causal, head_dim 64": {"head_dim": 64, "mask": "causal"},
    "V given transposed": {"v_transposed": True},
    "static, (3, 1) stages": {"parallelism": "persistent_static", "stages": (3, 1), "tile_kv": 128},
    "query_tiles, none": {"parallelism": "query_tiles", "overlap": "none"},
    "one stage": {"stages": 1},
    "uniform, V given transposed": {
        "roles": "uniform", "v_transposed": True, "overlap": "within", "parallelism": "query_tiles", "tile_kv": 128,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATED)
def test_every_mutant_is_flagged_or_explained(name: str) -> None:
    attention, schedule = load(PAPER_FP8, **MUTATED[name])
    (kernel,) = assemble(attention, schedule).kernels
    report = run_mutants(kernel, attention, schedule)
    assert not report.survivors, "\n".join(m.description for m in report.survivors)
    assert report.flagged > 3 * len(report.equivalent)  # most mistakes are mistakes
