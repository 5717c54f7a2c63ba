"""standard, fa1, the space between them and fa2, and the chains: right on the simulator, proven, compiled to their own instructions."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

import fagen
from fagen import Attention, InputError, Schedule, ScheduleError
from fagen import sass as sass_tools
from fagen.compile import build
from fagen.debug import SPILL_BYTES
from fagen.emit import emit
from fagen.explore.explain import explain
from fagen.library import builtin_names, chain, chain_names
from fagen.oracle import SimulatedFault, check, make_inputs, simulate, simulate_sample
from fagen.plan import assemble, plan
from fagen.plan import steps as st
from fagen.plan.counts import expected_counts
from fagen.plan.expr import as_expr
from fagen.plan.kernel import KernelPlan, Plan, Problem
from fagen.plan.mutants import mutants, run_mutants
from fagen.plan.proof import prove

STANDARD, FA1 = fagen.load("standard"), fagen.load("fa1")
SMALL = {"tile_q": 32, "tile_kv": 64, "warps": 2}
SPACE = [
    (loop, partition, normalise, movement, parallelism)
    for loop, partition, normalise, movement, parallelism in product(
        ("q_outer", "kv_outer"),
        ("split_q", "split_kv"),
        ("once", "each_step"),
        ("ld_st", "cp_async"),
        ("batch_heads", "query_tiles"),
    )
]
FIELDS = ("loop_order", "partition", "normalise", "movement", "parallelism")

SHAPES = (
    Problem(1, 65, 130, 2, 1),
    Problem(1, 96, 208, 4, 2),  # a query tile whose rows end in two key blocks
    Problem(2, 33, 0, 2, 1),
    Problem(1, 130, 70, 2, 2),  # causal: leading tiles that see nothing
    Problem(1, 1, 333, 4, 2),
)


def between(point: tuple[str, ...], stages: int | tuple[int, int] = 1) -> Schedule:
    return FA1.schedule.replace(stages=stages, **SMALL, **dict(zip(FIELDS, point)))


def assert_right(attention: Attention, schedule: Schedule, problem: Problem, p: Plan, seed: int = 1) -> None:
    q, k, v = make_inputs(attention, problem, seed=seed)
    out, lse = simulate(attention, schedule, q, k, v, plan=p, seed=seed)
    result = check(attention, q, k, v, out, lse)
    assert result.passed, f"{problem}: {result.reason}"


# the simulator ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("softmax, dtype", [("three_pass", "bf16"), ("two_pass", "fp16")])
def test_standard_is_right(mask: str, softmax: str, dtype: str) -> None:
    a, s = fagen.load("standard", mask=mask, softmax=softmax, dtype=dtype)
    for i, problem in enumerate((*SHAPES, Problem(1, 300, 170, 4, 2))):
        assert_right(a, s, problem, assemble(a, s), seed=i)


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize(
    "head_dim, problem", [(128, Problem(1, 70, 520, 2, 1)), (64, Problem(2, 33, 300, 2, 2)), (256, Problem(1, 40, 300, 1, 1))]
)
def test_fa1_is_right(mask: str, head_dim: int, problem: Problem) -> None:
    a, s = fagen.load("fa1", mask=mask, head_dim=head_dim)
    assert_right(a, s, problem, assemble(a, s))


@pytest.mark.parametrize("point", SPACE, ids="-".join)
def test_every_point_between_is_right_and_proven(point: tuple[str, ...]) -> None:
    number = SPACE.index(point)
    a = FA1.attention.replace(head_dim=64, mask=("full", "causal")[number % 2])
    for i, stages in enumerate((1,) if "ld_st" in point else (1, 2, (3, 1))):
        s = between(point, stages)
        p = plan(a, s)
        for problem in SHAPES[(number + i) % 2 :: 2]:
            assert_right(a, s, problem, p, seed=number)
        other = a.replace(mask="causal" if a.mask == "full" else "full")
        assert_right(other, s, SHAPES[1], plan(other, s), seed=number)


@pytest.mark.parametrize("name", ["standard", "fa1"])
def test_every_interleaving_gives_the_same_bits(name: str) -> None:
    a, s = fagen.load(name, head_dim=64, mask="causal")
    q, k, v = make_inputs(a, Problem(1, 70, 270, 2, 1), seed=3)
    outs = [simulate(a, s, q, k, v, seed=seed, num_sms=1 + seed % 3) for seed in range(4)]
    for out, lse in outs[1:]:
        assert np.array_equal(out.view(np.uint16), outs[0][0].view(np.uint16)) and np.array_equal(lse, outs[0][1])


def test_the_three_kernels_sample_the_same_tiles() -> None:
    """A sampled CTA of pv needs P of the same query tile, which needs S."""
    a, s = fagen.load("standard", mask="causal")
    q, k, v = make_inputs(a, Problem(1, 700, 700, 2, 1), seed=4)
    part = simulate_sample(a, s, q, k, v, seed=4, ctas=3)
    assert 0 < part.rows.sum() <= 3 * s.tile_q
    assert check(a, q, k, v, part.out, part.lse, rows=part.rows).passed


def test_ranges_of_query_tiles_follow_the_device() -> None:
    """kv_outer, query_tiles: as many CTAs as SMs where heads alone are too few, one a head where they are enough."""
    p = assemble(FA1.attention, FA1.schedule.replace(parallelism="query_tiles"))
    strides = dict.fromkeys(("q", "k", "v", "out"), (1, 1, 1))
    grid = lambda problem: p.bind(problem, strides, 132).kernels[0].grid  # noqa: E731
    assert grid(Problem(16, 4096, 4096, 16, 16)) == 256
    assert grid(Problem(1, 4096, 4096, 16, 16)) == 16 * 8
    assert grid(Problem(1, 32, 4096, 1, 1)) == 1


def test_workspaces_have_room_for_ragged_lengths_and_none_is_empty() -> None:
    strides = dict.fromkeys(("q", "k", "v", "out"), (1, 1, 1))
    sizes = {n: b for n, b, zeroed in assemble(*STANDARD).bind(Problem(2, 5, 129, 3, 1), strides, 132).workspaces if not zeroed}
    assert sizes == {"S": 2 * 3 * 5 * 256 * 4, "P": 2 * 3 * 5 * 256 * 2, "l_row": 2 * 3 * 128 * 4}
    assert all(b > 0 for _, b, _ in assemble(*STANDARD).bind(Problem(1, 5, 0, 1, 1), strides, 132).workspaces)
    sizes = {n: b for n, b, _ in assemble(*FA1).bind(Problem(1, 33, 5, 2, 2), strides, 132).workspaces}
    assert sizes == {"O_acc": 2 * 64 * 128 * 4, "m_acc": 2 * 64 * 4, "l_acc": 2 * 64 * 4}
    large = assemble(*STANDARD).bind(Problem(16, 4096, 4096, 16, 16), strides, 132)
    assert {n: b for n, b, _ in large.workspaces}["S"] == 16 * 16 * 4096 * 4096 * 4  # above 2^32: strides are 64-bit
    params = {p.name: p.ctype for p in assemble(*STANDARD).kernels[0].params}
    assert {params[f"S_{x}"] for x in ("sb", "sh", "ss")} == {"i64"}


# the proof --------------------------------------------------------------------------------------------------------------


VARIANTS = {
    "standard": STANDARD,
    "standard causal": (STANDARD.attention.replace(mask="causal"), STANDARD.schedule.replace(softmax="two_pass")),
    "fa1": FA1,
    "fa1 causal once": (FA1.attention.replace(mask="causal"), FA1.schedule.replace(normalise="once", parallelism="query_tiles")),
    "fa1 cp_async": (
        FA1.attention.replace(head_dim=64),
        FA1.schedule.replace(movement="cp_async", stages=2, tile_kv=64),
    ),
    "q_outer split_kv": (FA1.attention, FA1.schedule.replace(loop_order="q_outer")),
    "kv_outer split_q": (FA1.attention, between(("kv_outer", "split_q", "each_step", "ld_st", "query_tiles"))),
    "kv_outer split_q cp_async": (
        FA1.attention.replace(mask="causal"),
        between(("kv_outer", "split_q", "once", "cp_async", "batch_heads"), (1, 2)),
    ),
    "fa2 ld_st": (FA1.attention, fagen.load("fa2").schedule.replace(movement="ld_st", stages=1)),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_mutant_is_flagged_or_explained(name: str) -> None:
    attention, schedule = VARIANTS[name]
    for kernel in assemble(attention, schedule).kernels:
        r = run_mutants(kernel, attention, schedule)
        assert not r.survivors, "\n".join(m.description for m in r.survivors)
        assert r.total == 0 or r.flagged > len(r.equivalent) or "ld_st" in name


# Mistakes that must be flagged, whatever the reasons for equivalents come to say: variant, mutant, kind of failure.
CLASSIC = [
    ("fa1", "without warps.keys.blocks.tiles.merge", "race"),
    ("fa1", "without warps.keys.blocks.tiles.cta_sync", "race"),
    ("fa1", "without warps.keys.blocks.tiles.store_stats", "parts"),
    ("fa1", "without warps.keys.blocks.tiles.store_frag.2", "parts"),
    ("fa1", "without warps.keys.blocks.tiles.load_q", "stale"),
    ("fa1", "without warps.keys.blocks.load_k", "race"),
    ("fa1", "without warps.keys.blocks.tiles.last.else.store_acc_O_acc", "stale"),
    ("fa1 cp_async", "without warps.keys.blocks.cta_sync", "race"),  # one tile a CTA: m and l of the block before
    ("kv_outer split_q", "without warps.keys.blocks.tiles.cta_sync.2", "stale"),
    ("standard", "without warps.tile.steady.cta_sync", "race"),
    ("standard", "without warps.tile.steady.cta_sync.2", "race"),
]


@pytest.mark.parametrize("name, text, kind", CLASSIC)
def test_classic_mistakes(name: str, text: str, kind: str) -> None:
    attention, schedule = VARIANTS[name]
    original = assemble(attention, schedule).kernels[0]
    (found,) = [m for m in mutants(original) if m.description == text]
    result = prove(found.kernel, attention, schedule)
    assert not result.ok and kind in {f.kind for f in result.failures}, str(result)


def _without(body: st.Body, unwanted: str) -> st.Body:
    return tuple(
        replace(s, **{f: _without(b, unwanted) for f, b in st.bodies(s)})  # type: ignore[arg-type]
        for s in body
        if not s.id.endswith(unwanted)
    )


@pytest.mark.parametrize("unwanted", ["merge", "tiles.cta_sync", "tiles.store_stats", "tiles.store_frag.2"])
def test_the_simulator_sees_what_the_proof_sees(unwanted: str) -> None:
    """A mistake that the proof flags gives a wrong result, or a fault, in some interleaving."""
    a, s = FA1.attention.replace(head_dim=128), FA1.schedule
    p = assemble(a, s)
    (kernel,) = p.kernels
    broken = replace(kernel, roles=tuple(replace(r, body=_without(r.body, unwanted)) for r in kernel.roles))
    q, k, v = make_inputs(a, Problem(1, 64, 512, 1, 1), seed=5)
    wrong = 0
    for seed in range(6):
        try:
            out, lse = simulate(a, s, q, k, v, plan=replace(p, kernels=(broken,)), seed=seed)
            wrong += not check(a, q, k, v, out, lse).passed
        except SimulatedFault:
            wrong += 1
    assert wrong


def test_a_part_that_is_not_rescaled_is_wrong() -> None:
    """Data is the simulator's to check: without beta, P is against the warp's own maximum."""
    a, s = FA1
    p = assemble(a, s)
    (kernel,) = p.kernels

    def spoil(body: st.Body) -> st.Body:
        kept = [x for x in body if not (isinstance(x, st.Rescale) and x.alpha == "beta")]
        return tuple(replace(x, **{f: spoil(b) for f, b in st.bodies(x)}) for x in kept)  # type: ignore[arg-type]

    broken = replace(kernel, roles=tuple(replace(r, body=spoil(r.body)) for r in kernel.roles))
    q, k, v = make_inputs(a, Problem(1, 32, 512, 1, 1), seed=6)
    out, lse = simulate(a, s, q, k, v, plan=replace(p, kernels=(broken,)))
    assert not check(a, q, k, v, out, lse).passed


# the machine code -------------------------------------------------------------------------------------------------------


needs_sass = pytest.mark.skipif(sass_tools.nvdisasm() is None, reason="no nvdisasm")
COMPILED = {
    "standard": {},
    "standard causal": {"mask": "causal", "softmax": "two_pass", "head_dim": 256},
    "fa1": {},
    "fa1 causal": {"mask": "causal"},
}


@needs_sass
@pytest.mark.parametrize("name", COMPILED)
def test_standard_and_fa1_compile_to_their_own_instructions(name: str) -> None:
    """`build` holds every count of the program to the SASS, and refuses a spill."""
    a, s = fagen.load(name.split()[0], **COMPILED[name])
    p = assemble(a, s)
    report = build(p, emit(p, name)).report
    total = {n: sum(k.sass[n] for k in report.kernels if k.sass) for n in ("HMMA", "LDG.E.128", "LDGSTS", "HGMMA", "UTMALDG")}
    assert total["HMMA"] > 0 and total["LDG.E.128"] > 0 and total["LDGSTS"] == total["HGMMA"] == total["UTMALDG"] == 0
    assert all(k.spill_stores == k.stack_bytes == 0 for k in report.kernels)
    assert all(k.expected["LDG.E.128"] > 0 for k in report.kernels)


@needs_sass
@pytest.mark.parametrize("point", [SPACE[i] for i in (3, 13, 18, 30)], ids="-".join)
def test_points_between_compile_as_counted(point: tuple[str, ...]) -> None:
    tiles = {"tile_q": 32, "tile_kv": 256, "warps": 4} if "split_kv" in point else {"tile_q": 128, "tile_kv": 64, "warps": 8}
    s = between(point).replace(**tiles)
    p = assemble(FA1.attention.replace(mask="causal"), s)
    build(p, emit(p))


@needs_sass
@pytest.mark.parametrize("name", ["standard", "fa1"])
def test_debug_builds(name: str) -> None:
    p = assemble(*fagen.load(name), debug=True)
    report = build(p, emit(p, name), allow_spill_bytes=SPILL_BYTES).report
    assert len(report.kernels) == len(p.kernels)


def test_wide_loads_are_counted_where_there_are_any() -> None:
    tile = st.Smem("K", 96, 128, "bf16", 1)
    copy = st.Copy(src="k", dst=st.Slot("K", None), seq=as_expr(0), limit=as_expr(0), head=as_expr(0), batch=as_expr(0))

    def kernel(*body: st.Step) -> KernelPlan:
        role = st.Role("r", 8, 1, False, None, (), (), body)
        return KernelPlan("k", 256, 1, (), (), (), (), (tile,), (), (), 0, (role,), as_expr(1))

    assert expected_counts(kernel(copy))["LDG.E.128"] == 3  # 96 · 16 / 256 = 6 copies a thread, at most 4 in flight
    assert "LDG.E.128" not in expected_counts(kernel())


def test_the_source_prints_no_cp_async_for_ld_st() -> None:
    for name in ("standard", "fa1"):
        text = emit(assemble(*fagen.load(name)), name).text
        assert "cp.async" not in text and "wgmma" not in text and "ldmatrix" in text


# legality ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, changes, code, field, words",
    [
        ("fa1", {"stages": 2}, "stages", "stages", ("2 slots", "ld_st")),
        ("fa1", {"tile_kv": 96}, "tile-kv", "tile_kv", ("96", "16 keys for each of 4 warps")),
        ("fa1", {"tile_q": 128, "tile_kv": 64}, "registers", "tile_kv", ("O_part 256",)),
        ("fa1", {"head_dim": 64, "tile_q": 16, "warps": 8}, "tile-q", "tile_q", ("128 copies", "256 threads")),
        ("standard", {"loop_order": "kv_outer"}, "softmax", "loop_order", ("three_pass", "q_outer")),
        ("standard", {"partition": "split_kv"}, "softmax", "partition", ("split_q",)),
        ("standard", {"normalise": "each_step"}, "softmax", "normalise", ("once",)),
        ("standard", {"movement": "cp_async"}, "softmax", "movement", ("ld_st",)),
        ("standard", {"parallelism": "batch_heads"}, "softmax", "parallelism", ("query_tiles",)),
        ("standard", {"tile_kv": 32}, "tile-kv", "tile_kv", ("multiple of 64",)),
        ("fa3", {"softmax": "two_pass"}, "softmax", "mma", ("mma_sync",)),
        ("fa3", {"loop_order": "kv_outer"}, "loop-order", "loop_order", ("mma_sync",)),
        ("fa3", {"partition": "split_kv"}, "partition", "partition", ("mma_sync",)),
        ("fa3", {"normalise": "each_step"}, "normalise", "normalise", ("mma_sync",)),
    ],
)
def test_what_the_matrix_forbids(name: str, changes: dict[str, object], code: str, field: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ScheduleError) as e:
        plan(*fagen.load(name, **changes))
    found = [v for v in e.value.violations if (v.code, v.field) == (code, field)]
    assert found, str(e.value)
    assert all(w in found[0].message for w in words), found[0].message


@pytest.mark.parametrize(
    "field, value",
    [
        ("loop_order", "q_outer"),
        ("partition", "split_q"),
        ("normalise", "once"),
        ("movement", "cp_async"),
        ("parallelism", "query_tiles"),
        ("softmax", "two_pass"),
    ],
)
def test_every_knob_changes_program_and_code(field: str, value: str) -> None:
    a, s = (
        STANDARD if field == "softmax" else (FA1.attention, between(("kv_outer", "split_kv", "each_step", "ld_st", "batch_heads")))
    )
    before, after = assemble(a, s), assemble(a, s.replace(**{field: value}))
    assert [k.roles for k in before.kernels] != [k.roles for k in after.kernels]
    assert emit(before).code_sha256 != emit(after).code_sha256


# chains and texts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "last", "steps"), [("fa1", "fa2", 5), ("fa2", "fa3", 6), ("fa3", "fa3_fp8", 3)])
def test_a_chain_changes_one_idea_a_step(first: str, last: str, steps: int) -> None:
    names = chain(first, last)
    assert (names[0], names[-1], len(names)) == (first, last, steps + 1)
    together = (
        {"partition", "tile_q", "tile_kv", "warps"},
        {"arch", "mma", "movement", "tile_kv", "warps", "consumers"},
        {"movement", "stages"},
        {"tile_kv", "scale_granularity"},
        {"reference", "overlap", "tile_kv", "stages"},
    )
    for before, after in pairwise(names):
        for head_dim in (64, 128, 256):
            a, s = fagen.load(after, head_dim=head_dim)
            assemble(a, s), assemble(a.replace(mask="causal"), s)
        changed = set(fagen.load(before).schedule.diff(fagen.load(after).schedule))
        assert len(changed) == 1 or any(changed <= t for t in together), (before, after, changed)
    assert set(names[1:-1]) <= set(chain_names()) and not set(chain_names()) & set(builtin_names())


def test_a_chain_that_does_not_exist() -> None:
    with pytest.raises(InputError, match="fa1 → fa2, fa2 → fa3, fa3 → fa3_fp8"):
        chain("fa1", "fa3")
    with pytest.raises(InputError, match="fa3 → fa3_fp8"):
        chain("fa3", "fa3")
    with pytest.raises(InputError, match="did you mean chain/fa1_to_fa2"):
        fagen.load("chain/fa1_to_fa2_2_q_outr")


def test_explain_tells_what_crosses_between_warps_and_kernels() -> None:
    fa1 = "\n".join(explain(plan(*FA1))["loop_nest"])
    for line in (
        "O += all warps' parts",
        "merge m_ref and l_sum with all warps'",
        "store O_acc ← O",
        "load O ← O_acc",
        "copy K ← k[",
    ):
        assert line in fa1, line
    standard = explain(plan(*STANDARD))
    assert [k["name"] for k in standard["kernels"]] == ["qk", "softmax", "pv"]
    assert "  row pass: P ← S[r]" in "\n".join(standard["loop_nest"])
