"""Scales of a tensor, a head or a block, and the float32 copy of the accumulator: rules, launches, and what the simulator computes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_cuda import FakeCuda, Tensor, attention_kernel, fake_torch, install, read_arguments
from fp8_steps import PAPER_FP8
from simulated import simulated

import fagen
from fagen import InputError, ScheduleError, simulate_quantise
from fagen.descales import by_row
from fagen.launch import Kernel
from fagen.library import Loaded, load
from fagen.oracle import CheckProblem, check, make_descales, make_inputs, reference, simulate
from fagen.oracle.numeric import E4M3_DEPTH, rounded, tensor_core
from fagen.oracle.simulator import instance
from fagen.plan import Problem, assemble, plan, rules
from fagen.plan import steps as S
from fagen.plan.mutants import run_mutants
from fagen.plan.scales import LEAST_V_SCALE
from fagen.plan.steps import Fill, LoadScale, Mma, Promote, Rescale, ScaleShift, walk

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
SMALL = {"head_dim": 64, "tile_q": 128, "tile_kv": 64, "consumers": 2}
GRANULARITIES = ("tensor", "head", "block")


def fp8(**changes: Any) -> Loaded:
    return load(PAPER_FP8, **{**SMALL, **changes})


# the program ----------------------------------------------------------------------------------------------------------------------


def steps_of(**changes: Any) -> list[Any]:
    (kernel,) = assemble(*fp8(**changes)).kernels
    return [s for r in kernel.roles for s in walk(r.body)]


def test_where_scales_are_read() -> None:
    """Once a tile, or with every block those of the block; a tensor's have no place."""
    for granularity in ("tensor", "head"):
        loads = [s for s in steps_of(scale_granularity=granularity) if isinstance(s, LoadScale)]
        assert [s.factors for s in loads] == [("q_descale", "k_descale"), ("v_descale",)]
        assert all((s.head is None) == (granularity == "tensor") and s.block is None for s in loads)
    steps = steps_of(scale_granularity="block", mask="causal")
    loads = [s for s in steps if isinstance(s, LoadScale)]
    assert [s.factors for s in loads] == [("q_descale",), *3 * [("k_descale",), ("v_descale",)]]  # prologue and two segments
    assert all(s.block is not None for s in loads)
    assert sum(isinstance(s, ScaleShift) for s in steps) == 3


@pytest.mark.parametrize("overlap", ["none", "within", "pingpong", "both"])
def test_every_block_alone_or_every_few(overlap: str) -> None:
    """With 1 the products start anew and O is never rescaled; with more, both sums are, and O is cleared where it was added."""
    alone, few, never = (steps_of(overlap=overlap, promote_every=n) for n in (1, 3, None))
    for steps, accumulate in ((alone, False), (few, True), (never, True)):
        assert {s.accumulate for s in steps if isinstance(s, Mma) and s.d == "O"} == {accumulate}
    assert {s.o for s in alone if isinstance(s, Rescale)} == {"O_sum"}
    assert {s.o for s in few if isinstance(s, Rescale)} == {"O", "O_sum"}
    assert not any(isinstance(s, Promote) for s in never)
    assert not any(isinstance(s, Fill) and s.dst == "O" for s in alone)
    assert sum(isinstance(s, Fill) and s.dst == "O" for s in few) == 1 + sum(isinstance(s, Promote) for s in few) - 1


def test_the_copy_costs_registers_and_may_be_left_out() -> None:
    with pytest.raises(ScheduleError) as e:
        plan(*load(PAPER_FP8, promote_every=4))
    (found,) = e.value.violations
    assert found.code == "registers" and "O_sum 64" in found.message
    assert "promote_every=None" in found.nearest and "tile_kv=128" in found.nearest
    plan(*load(PAPER_FP8, promote_every=4, tile_kv=128))
    with pytest.raises(ScheduleError) as e:  # no tile is small enough for two accumulators of 256 columns
        plan(*load(PAPER_FP8, head_dim=256, promote_every=4))
    (found,) = e.value.violations
    assert found.code == "registers" and found.nearest == ("promote_every=None",)


# the simulator --------------------------------------------------------------------------------------------------------------------

HOW: dict[str, dict[str, Any]] = {
    "running, both": {},
    "running, none": {"overlap": "none"},
    "running, pingpong": {"overlap": "pingpong"},
    "stale, within": {"reference": "stale", "overlap": "within"},
    "stale, fused tiles": {"reference": "stale", "overlap": "within", "fuse_tiles": True},
    "uniform, V transposed": {"roles": "uniform", "overlap": "within", "v_transposed": True, "parallelism": "query_tiles"},
}
PROBLEMS = [
    CheckProblem(2, 130, 5 * 64 + 1, 4, 2, "descaled"),
    CheckProblem(1, 150, 9 * 64, 2, 1, "uneven"),
    CheckProblem(1, 140, 70, 2, 2, "descaled"),  # under a causal mask rows that see nothing
    CheckProblem(1, 140, 0, 2, 2, "descaled"),
]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_right_on_every_path(granularity: str, mask: str, how: str) -> None:
    for n, promote in enumerate((None, 1, 2)):
        a, s = fp8(scale_granularity=granularity, mask=mask, promote_every=promote, **HOW[how])
        for problem in PROBLEMS[n::2]:
            _, verdict = simulated(a, s, problem)
            assert verdict.passed, (problem, promote, verdict)


def test_equal_scales_of_blocks_are_those_of_a_head() -> None:
    problem = Problem(2, 130, 257, 4, 2)
    (a, of_head), of_block = fp8(), fp8(scale_granularity="block").schedule
    q, k, v = make_inputs(a, problem)
    given = {"q_descale": 0.5, "k_descale": 2.0, "v_descale": 4.0}
    like = make_descales(problem, of_block)
    arrays = {n: np.full_like(x, given[n]) for n, x in like.items()}
    want, want_lse = simulate(a, of_head, q, k, v, **given)
    for descales in (given, arrays):
        out, lse = simulate(a, of_block, q, k, v, **descales)
        np.testing.assert_allclose(out.astype(float), want.astype(float), rtol=2**-7, atol=1e-6)
        np.testing.assert_allclose(lse, want_lse, rtol=1e-6)


@pytest.mark.parametrize("reference_", ["running", "stale"])
@pytest.mark.parametrize(
    "v_scales",
    [
        (1.0, 2.0**36, LEAST_V_SCALE, 1.0),  # the whole range
        (2.0**36, LEAST_V_SCALE, 2.0**36, LEAST_V_SCALE),
        (0.0, 0.0, 0.0, 1.0),  # blocks are walked from the last to the first
        (1.0, 0.0, 0.0, 0.0),
        (2.0**-60, 2.0**-40, 2.0**-20, 1.0),
        (1.0, 2.0**-20, 2.0**-40, 2.0**-60),
    ],
    ids=["ends", "alternating", "zeros first", "zeros last", "falling", "growing"],
)
def test_block_scales_at_the_ends_of_their_range(v_scales: tuple[float, ...], reference_: str) -> None:
    """Neither overflow nor needless underflow: out is right to the operands' precision, and lse does not depend on v's scales."""
    problem = Problem(1, 128, 4 * 64, 2, 1)
    a, s = fp8(scale_granularity="block", reference=reference_, overlap="within")
    q, k, v = make_inputs(a, problem, seed=7)
    scales = np.array(v_scales, np.float32).reshape(1, 1, 4)
    out, lse = simulate(a, s, q, k, v, v_descale=scales)
    want, want_lse = reference(a, q, k, v, **by_row(s, problem, {"v_descale": scales}))
    _, plain_lse = simulate(a, s, q, k, v)
    assert np.isfinite(out.astype(float)).all()
    np.testing.assert_allclose(lse, plain_lse, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, atol=2e-3)
    error = np.sqrt(np.mean((out.astype(float) - want) ** 2))
    assert error < 0.05 * np.sqrt(np.mean(want**2))


def errors_beside(keys: slice, above: float) -> dict[str, float]:
    """Relative RMSE of out, with a running and a stale reference, where `keys` of 2048 are `above` the others and have no values, so that the
    others make up out (their scores are spread: equal ones would round alike). `check` passes what it is of."""
    problem = Problem(1, 64, 2048, 1, 1)
    errors = {}
    for how in ("running", "stale"):
        a, s = fp8(head_dim=64, tile_q=64, consumers=1, tile_kv=128, overlap="within", reference=how)
        rng = np.random.default_rng(0)
        q, k, v = (np.zeros((1, n, 1, 64), np.float32) for n in (problem.sq, problem.sk, problem.sk))
        q[..., 1:9], k[..., 1:9] = (0.5 * rng.standard_normal((1, x.shape[1], 1, 8)) for x in (q, k))
        v[:] = 1 + 0.5 * rng.standard_normal((1, problem.sk, 1, 64))
        k[:, keys] = v[:, keys] = 0
        q[..., 0], k[:, keys, :, 0] = 8.0, above
        q, k, v = (x.astype(E4M3) for x in (q, k, v))
        out, lse = simulate(a, s, q, k, v)
        want, want_lse = reference(a, q, k, v)
        errors[how] = float(np.sqrt(np.mean((out.astype(float) - want) ** 2) / np.mean(want**2)))
        np.testing.assert_allclose(lse, want_lse, atol=1e-4)
        for schedule in (None, s):
            assert check(a, q, k, v, out, lse, schedule=schedule).passed
    return errors


@pytest.mark.parametrize("above", [7.0, 10.0, 11.0])
@pytest.mark.parametrize("at", [2047, 1000, 0], ids=["last", "middle", "first"])
def test_a_key_that_stands_out_costs_the_others_little(at: int, above: float) -> None:
    """docs/schedule.md, `reference`. The last key comes first, so all the others are against it: with P at 2^7, at 11 above, they are 1 to 2
    times the least value e4m3 has."""
    errors = errors_beside(slice(at, at + 1), above)
    assert errors["stale"] < 0.01 or errors["stale"] < 2 * errors["running"]


@pytest.mark.parametrize("above", [4.0, 6.0])
def test_many_keys_that_share_a_row_cost_the_others_little(above: float) -> None:
    """The 128 of the first block: their sum is 2^7 of one's weight, a reference at most 2^3."""
    errors = errors_beside(slice(-128, None), above)
    assert errors["stale"] < 2 * errors["running"] < 0.02


def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many blocks behind a tile's first the warps of a simulation compute exactly, and against a stale reference: filled as it runs."""
    counts = {"exact": 0, "stale": 0}

    def count(kind: type[S.Step], name: str) -> None:
        action = instance._ACTIONS[kind]

        def counting(x: Any, step: Any) -> Any:
            if not getattr(step, "first", False):
                counts[name] += 4 if x._rows is None else int(x._rows.sum()) // 16
            return action(x, step)

        monkeypatch.setitem(instance._ACTIONS, kind, counting)

    count(S.OnlineSoftmax, "exact")
    count(S.StaleSoftmax, "stale")
    return counts


@pytest.mark.parametrize("mask, spread, most", [("full", 1.0, 0.005), ("causal", 1.0, 0.15), ("full", 2.0, 0.27)])
def test_few_blocks_are_computed_twice(mask: str, spread: float, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks behind a tile's first, by warp. With no lift above the maximum it would be 0.22, 0.38 and 0.58 of them;
    rows that see little of their first block (causal: one warp of four, blocks 1 and maybe 2) start over in any case."""
    counts = counted(monkeypatch)
    a, s = fp8(
        head_dim=64,
        tile_q=64,
        consumers=1,
        tile_kv=64,
        overlap="within",
        reference="stale",
        mask=mask,
    )
    q, k, v = make_inputs(a, Problem(1, 512, 512, 2, 2), seed=3)
    simulate(a, s, (spread * q.astype(np.float32)).astype(E4M3), k, v)
    assert counts["stale"] == 4 * 2 * 8 * (7 if mask == "full" else 3.5)
    assert counts["exact"] <= most * counts["stale"]


def test_rows_that_see_little_of_their_first_block_begin_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """All scores are 0, so nothing else is computed exactly. Rows 0 to 15 of a tile see 1 to 16 keys of their first block, the others more."""
    counts = counted(monkeypatch)
    a, s = fp8(head_dim=64, tile_q=64, consumers=1, tile_kv=64, overlap="within", reference="stale", mask="causal")
    q, k, v = make_inputs(a, Problem(1, 256, 256, 1, 1), seed=3)
    simulate(a, s, np.zeros_like(q), k, v)
    assert counts["exact"] == 3, "one warp, in each of three tiles that have a second block"


@pytest.mark.parametrize("reference_", ["running", "stale"])
@pytest.mark.parametrize("scale", [2.0**-20, 2.0**20])
def test_a_common_scale_of_all_blocks_changes_nothing(scale: float, reference_: str) -> None:
    """Row sums do not have it, references do: neither is taken for the other."""
    a, s = fp8(scale_granularity="block", reference=reference_, overlap="within")
    problem = Problem(1, 128, 256, 1, 1)
    q, k, v = make_inputs(a, problem, seed=9)
    scaled, _ = simulate(a, s, q, k, v, v_descale=np.full((1, 1, 4), scale, np.float32))
    plain, _ = simulate(a, s, q, k, v, v_descale=1.0)
    np.testing.assert_allclose(scaled.astype(float) / scale, plain.astype(float), rtol=2**-5, atol=1e-5)  # roundings may part


def test_a_lift_changes_neither_out_nor_lse() -> None:
    """Of a row whose keys all weigh the same: the reference stands 3 above the maximum."""
    a, s = fp8(head_dim=64, tile_q=64, consumers=1, tile_kv=64, overlap="within", reference="stale")
    problem = Problem(1, 64, 256, 1, 1)
    q, k, v = make_inputs(a, problem, seed=5)
    q = np.zeros_like(q)
    out, lse = simulate(a, s, q, k, v)
    want, want_lse = reference(a, q, k, v)
    assert np.abs(lse - np.log(256)).max() < 1e-6 and np.abs(want_lse - lse).max() < 1e-6
    np.testing.assert_allclose(out.astype(float), want, atol=2**-8 * np.abs(want).max())


def test_a_row_whose_weight_lies_in_small_blocks_keeps_its_precision() -> None:
    """Its reference is that of what it sees: against the largest scale of the tensor its P would vanish."""
    a, s = fp8(scale_granularity="block", mask="causal")
    problem = Problem(1, 128, 128, 1, 1)
    q, k, v = make_inputs(a, problem, seed=8)
    scales = np.array([2.0**-30, 1.0], np.float32).reshape(1, 1, 2)  # rows 0 … 63 see the small block alone
    out, _ = simulate(a, s, q, k, v, v_descale=scales)
    plain, _ = simulate(a, s, q, k, v, v_descale=1.0)
    np.testing.assert_array_equal(out[:, :64].astype(float) * 2.0**30, plain[:, :64].astype(float))


@pytest.mark.parametrize("reference_", ["running", "stale"])
def test_nan_scales_are_seen(reference_: str) -> None:
    """From device memory, where nobody checks them: rows that see the block are NaN."""
    a, s = fp8(scale_granularity="block", reference=reference_, overlap="within", mask="causal")
    problem = Problem(1, 128, 128, 1, 1)
    q, k, v = make_inputs(a, problem)
    scales = np.array([1.0, np.nan], np.float32).reshape(1, 1, 2)
    with pytest.MonkeyPatch.context() as m:
        m.setattr("fagen.oracle.simulator.as_arrays", lambda attention, given, forms: {"v_descale": scales})
        with np.errstate(invalid="ignore"):
            out, _ = simulate(a, s, q, k, v)
    assert np.isnan(out[:, 64:].astype(float)).all()


# the tensor core's sums -------------------------------------------------------------------------------------------------------------


def test_a_sum_goes_on_from_where_it_was() -> None:
    rng = np.random.default_rng(0)
    a, b = (rounded(rng.standard_normal(shape, np.float32), "e4m3") for shape in ((16, 4 * E4M3_DEPTH), (4 * E4M3_DEPTH, 8)))
    for terms in (False, True):
        whole = tensor_core(a, b, "e4m3", terms=terms)
        half = tensor_core(a[:, : 2 * E4M3_DEPTH], b[: 2 * E4M3_DEPTH], "e4m3", terms=terms)
        kept = half.copy()
        assert np.array_equal(tensor_core(a[:, 2 * E4M3_DEPTH :], b[2 * E4M3_DEPTH :], "e4m3", terms=terms, start=half), whole)
        assert np.array_equal(half, kept), "what the accumulator held is not changed"
    exact = a.astype(np.float64) @ b.astype(np.float64)
    assert np.abs(tensor_core(a, b, "bf16", start=np.ones((16, 8), np.float32)) - 1 - exact).max() < 1e-4


def test_terms_below_the_last_bit_are_lost() -> None:
    """1 + 32 · 2^−14: nothing is left of terms below 2^−13 of the largest, unless they come together first."""
    a = np.full((1, E4M3_DEPTH), 2.0**-7, np.float32)
    b = np.full((E4M3_DEPTH, 1), 2.0**-7, np.float32)
    start = np.ones((1, 1), np.float32)
    assert tensor_core(a, b, "e4m3", terms=True, start=start)[0, 0] == 1.0
    assert tensor_core(a, b, "e4m3", terms=True)[0, 0] == 2.0**-9
    assert tensor_core(a, b, "e4m3", start=start)[0, 0] == 1.0 + 2.0**-9


@pytest.mark.parametrize("how", [{"overlap": "none"}, {"overlap": "within"}, {"overlap": "within", "reference": "stale"}], ids=str)
def test_promotion_makes_long_sums_exact(how: dict[str, Any]) -> None:
    """Values of one sign over 4096 keys: the tensor core alone loses percents, the oftener it is relieved the less."""
    errors = {}
    for every in (None, 8, 1):
        a, s = fp8(tile_q=64, consumers=1, promote_every=every, **how)
        q, k, v = make_inputs(a, Problem(1, 64, 4096, 1, 1), seed=2)
        v = (v.astype(np.float32) * 0.5 + 1).astype(E4M3)
        want, _ = reference(a, q, k, v)
        out, _ = simulate(a, s, q, k, v, exact_sums=True)
        errors[every] = float(np.sqrt(np.mean((out.astype(float) - want) ** 2)))
    assert errors[None] > 4 * errors[8] > 8 * errors[1], errors
    assert errors[1] < 4e-3, errors


# launching ----------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    return fake_torch(monkeypatch)


def make(fake: FakeCuda, **changes: Any) -> Kernel:
    p = assemble(*fp8(**changes))
    fake.kernel = attention_kernel(p)
    return Kernel(p, "// text", b"cubin", None)


PROBLEM = Problem(3, 200, 150, 4, 2)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_arrays_of_every_form(granularity: str, library: str, fake: FakeCuda, torch: Any) -> None:
    kernel = make(fake, scale_granularity=granularity)
    a, s = kernel.plan.attention, kernel.plan.schedule
    q, k, v = make_inputs(a, PROBLEM)
    wrap = Tensor if library == "torch" else np.asarray
    tensors = [wrap(x) for x in (q, k, v)]
    for seed in (1, 2):
        scales = make_descales(PROBLEM, s, seed=seed)
        out, lse = kernel(*tensors, **{n: wrap(x) for n, x in scales.items()})
        want, want_lse = reference(a, q, k, v, **by_row(s, PROBLEM, scales))
        np.testing.assert_allclose(np.asarray(getattr(out, "array", out)).astype(float), want, rtol=2**-7, atol=1e-6)
        np.testing.assert_allclose(getattr(lse, "array", lse), want_lse, rtol=1e-5, atol=1e-5)


def test_what_the_kernel_receives(fake: FakeCuda, torch: Any) -> None:
    """A tensor's scale has no strides, those of blocks follow from the sizes; without keys their pointers are null."""
    seen: list[Any] = []
    for granularity in GRANULARITIES:
        kernel = make(fake, scale_granularity=granularity)
        p, s = kernel.plan, kernel.plan.schedule
        names = [x.name for x in p.kernels[0].params]
        assert ("q_descale_sb" in names) == (granularity != "tensor")
        fake.kernel = lambda params, plan=p: seen.append(read_arguments(plan.kernels[0], params)[1])
        q, k, v = (Tensor(x) for x in make_inputs(p.attention, PROBLEM))
        scales = {n: Tensor(x) for n, x in make_descales(PROBLEM, s).items()}
        kernel(q, k, v, **scales)
        assert [seen[-1].q_descale, seen[-1].v_descale] == [scales[n].data_ptr() for n in ("q_descale", "v_descale")]
    assert (seen[2].q_descale_sb, seen[2].q_descale_sh) == (4 * 2, 2)  # 200 rows are two tiles of 128
    assert (seen[2].k_descale_sb, seen[2].k_descale_sh) == (2 * 3, 3)  # 150 keys are three blocks of 64
    nothing = Problem(3, 200, 0, 4, 2)
    q, k, v = (Tensor(x) for x in make_inputs(p.attention, nothing))
    kernel(q, k, v, **{n: Tensor(x) for n, x in make_descales(nothing, s).items()})
    assert seen[-1].q_descale and not seen[-1].k_descale and not seen[-1].v_descale


def blocks(*shape: int) -> np.ndarray[Any, Any]:
    return np.ones(shape, np.float32)


WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("tensor", {"q_descale": blocks(2)}, "q_descale", r"has shape \(2,\); expected an array of one element, or one number"),
    ("tensor", {"k_descale": blocks(3, 2)}, "k_descale", r"has shape \(3, 2\); expected an array of one element"),
    ("head", {"k_descale": blocks(1)}, "k_descale", r"has shape \(1,\); expected \(3, 2\) \(batch, kv_heads\), or one number"),
    ("block", {"q_descale": blocks(3, 2)}, "q_descale", r"expected \(3, 4, 2\) \(batch, heads, query_tiles\), or one number"),
    ("block", {"q_descale": blocks(3, 2, 2)}, "q_descale", r"has shape \(3, 2, 2\); expected \(3, 4, 2\)"),
    ("block", {"k_descale": blocks(3, 2, 2)}, "k_descale", r"expected \(3, 2, 3\) \(batch, kv_heads, key_blocks\)"),
    ("block", {"v_descale": -1.0}, "v_descale", "is -1; a negative descale of v's blocks becomes part of P, which is positive"),
    ("block", {"k_descale": -1.0}, "k_descale", "is -1; a negative descale of k would turn"),
]


@pytest.mark.parametrize("granularity, descales, argument, text", WRONG)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_wrong_forms_are_named(
    library: str, granularity: str, descales: dict[str, Any], argument: str, text: str, fake: FakeCuda, torch: Any
) -> None:
    kernel = make(fake, scale_granularity=granularity)
    wrap = Tensor if library == "torch" else np.asarray
    tensors = [wrap(x) for x in make_inputs(kernel.plan.attention, PROBLEM)]
    kernel(*tensors, **{argument: 1.0})  # also when a call with a number has been prepared
    given = {n: wrap(x) if isinstance(x, np.ndarray) else x for n, x in descales.items()}
    with pytest.raises(InputError, match=text) as error:
        kernel(*tensors, **given)
    assert error.value.argument == argument and len(fake.launches) == 1
    if library == "numpy":
        with pytest.raises(InputError, match=text):
            fagen.simulate(kernel.plan.attention, kernel.plan.schedule, *tensors, **given)


def test_blocks_are_contiguous_and_their_values_are_checked(fake: FakeCuda, torch: Any) -> None:
    kernel = make(fake, scale_granularity="block")
    q, k, v = make_inputs(kernel.plan.attention, PROBLEM)
    strided = np.ones((3, 3, 2), np.float32).transpose(0, 2, 1)
    with pytest.raises(InputError, match=r"^k_descale: must be contiguous; shape \(3, 2, 3\) has strides"):
        kernel(*(Tensor(x) for x in (q, k, v)), k_descale=Tensor(strided))
    kernel(q, k, v, k_descale=strided)  # NumPy is copied
    negative = np.ones((3, 2, 3), np.float32)
    negative[2, 1, 0] = -1
    for name in ("k_descale", "v_descale"):
        with pytest.raises(InputError, match=rf"{name}: is -1.0 at \(2, 1, 0\); a descale of . is finite and not negative"):
            kernel(q, k, v, **{name: negative})


def test_the_oracle_takes_scales_by_row() -> None:
    a, s = fp8(scale_granularity="block")
    q, k, v = make_inputs(a, PROBLEM)
    rows = by_row(s, PROBLEM, make_descales(PROBLEM, s))
    assert {n: x.shape for n, x in rows.items()} == {"q_descale": (3, 4, 200), "k_descale": (3, 2, 150), "v_descale": (3, 2, 150)}
    wide = [x.astype(np.float64) * rows[f"{n}_descale"].transpose(0, 2, 1)[..., None] for n, x in (("q", q), ("k", k), ("v", v))]
    for mine, want in zip(reference(a, q, k, v, **rows), reference(a.replace(dtype="bf16"), *wide)):
        np.testing.assert_allclose(mine, want, rtol=1e-13, atol=1e-13)
    with pytest.raises(InputError, match=r"expected \(3, 2\) \(batch, kv_heads\) or \(3, 2, 150\) \(batch, kv_heads, seqlen_k\)"):
        reference(a, q, k, v, k_descale=np.ones((3, 2, 149), np.float32))


# mutants --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"promote_every": 2}, {"promote_every": 1, "reference": "stale"}], ids=str)
def test_every_mutant_is_flagged_or_explained(changes: dict[str, Any]) -> None:
    attention, schedule = fp8(scale_granularity="block", mask="causal", **changes)
    (kernel,) = assemble(attention, schedule).kernels
    report = run_mutants(kernel, attention, schedule)
    assert not report.survivors, "\n".join(m.description for m in report.survivors)
    assert report.flagged > 3 * len(report.equivalent)


def test_a_sum_promoted_while_its_product_runs_is_refused() -> None:
    """Rule (c): the copy waits for the product like everybody else."""
    from dataclasses import replace

    from fagen.plan.proof import prove

    attention, schedule = fp8(promote_every=1, overlap="none")
    (kernel,) = assemble(attention, schedule).kernels

    def early(body: Any) -> Any:
        out = []
        for step in body:
            inner = {f: early(b) for f, b in (("body", getattr(step, "body", ())), ("then", getattr(step, "then", ()))) if b}
            step = replace(step, **inner) if inner else step
            if isinstance(step, Mma) and step.d == "O":
                out += [step, Promote(total="O_sum", o="O", id="too.early")]
            else:
                out.append(step)
        return tuple(out)

    roles = tuple(replace(r, body=early(r.body)) if r.name == "consumer" else r for r in kernel.roles)
    result = prove(replace(kernel, roles=roles), attention, schedule)
    assert not result.ok and "touches O while" in str(result.failures[0])


def test_the_rules_hold_for_what_the_tests_use() -> None:
    for how in HOW.values():
        rules.check(*fp8(scale_granularity="block", promote_every=2, **how))


# scales whose product float32 has no number for ----------------------------------------------------------------------------------


JOINED: dict[str, Any] = {"reference": "stale", "overlap": "within", "fuse_tiles": True}


@pytest.mark.parametrize("changes", [{}, {"mask": "causal"}, {"mask": "causal", **JOINED}], ids=["full", "causal", "joined"])
@pytest.mark.parametrize("dtype", ["e4m3", "int8"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_q04_quantised_zeros_attend_to_all_alike(granularity: str, dtype: str, changes: dict[str, Any]) -> None:
    """In two steps: both descales are so small that their product is 0, and 0 · −inf of a masked score would be NaN."""
    a, s = fp8(scale_granularity=granularity, dtype=dtype, **changes)
    tiles = {"tile_q": s.tile_q, "tile_kv": s.tile_kv} if granularity == "block" else {}
    bf16 = np.dtype(ml_dtypes.bfloat16)
    v = np.random.default_rng(0).standard_normal((1, 90, 1, 64)).astype(bf16)
    q, k = np.zeros((1, 70, 2, 64), bf16), np.full((1, 90, 1, 64), 1e-33, bf16)
    z = simulate_quantise(q, k, v, precision="fp8" if dtype == "e4m3" else dtype, granularity=granularity, **tiles)
    assert np.float32(z.q_descale.max()) * np.float32(z.k_descale.max()) == 0
    exact, exact_lse = fagen.reference(a.replace(dtype="bf16"), q, k, v)
    zeros = {n: np.zeros_like(getattr(z, n)) for n in ("q_descale", "k_descale")}
    for descales in ({"q_descale": z.q_descale, "k_descale": z.k_descale}, zeros, {"q_descale": 0, "k_descale": 0.0}):
        out, lse = simulate(a, s, z.q, z.k, z.v, v_descale=z.v_descale, **descales)
        assert np.abs(out.astype(np.float64) - exact).max() < 0.03
        np.testing.assert_allclose(lse, exact_lse, rtol=1e-6)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_only_the_product_of_descales_has_a_least_value(granularity: str) -> None:
    """One of them may be as small as float32 is where the other makes up for it."""
    a, s = fp8(scale_granularity=granularity)
    q, k, v = make_inputs(a, Problem(1, 130, 200, 2, 1), seed=1)
    out, lse = simulate(a, s, q, k, v, q_descale=2.0**-110, k_descale=2.0**110)
    want = simulate(a, s, q, k, v)
    assert np.array_equal(out, want[0]) and np.array_equal(lse, want[1])
    _, lse = simulate(a, s, q, k, v, q_descale=2.0**-127, k_descale=2.0**127)  # multiplications take a subnormal for 0
    np.testing.assert_allclose(lse, np.log(200), rtol=1e-6)


@pytest.mark.parametrize("granularity", ["head", "block"])
def test_a_descale_that_is_nan_shows(granularity: str) -> None:
    """As quantised int8 tensors with NaN have it: and it is not taken for less than 2^−100."""
    a, s = fp8(scale_granularity=granularity, dtype="bf16", precision="int8")
    bf16 = np.dtype(ml_dtypes.bfloat16)
    q, k, v = (np.random.default_rng(i).standard_normal((1, 70, 2, 64)).astype(bf16) for i in range(3))
    k[0, 3, 1, 0] = np.nan
    _, lse = simulate(a, s, q, k, v)
    assert np.isnan(lse[:, 1]).all() and np.isfinite(lse[:, 0]).all()
