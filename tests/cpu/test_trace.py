"""Trace builds without a GPU: what they print and how they compile, and what is read from their marks, which the simulator makes."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
from fp8_steps import PAPER_FP8
from trace_source import CYCLES_PER_NS, simulated

import fagen
from fagen import InputError, sass
from fagen.compile import Built, build
from fagen.emit import emit
from fagen.errors import CompileError
from fagen.explore.trace import KernelTrace, Lane, Span, Track, measure, panel, perfetto, picture, read
from fagen.explore.trace.overlap import common, length, union
from fagen.explore.trace.svg import COLOURS
from fagen.oracle import CheckProblem
from fagen.plan import Plan, plan
from fagen.plan import quantise_steps as qs
from fagen.plan import steps as st
from fagen.plan.kernel import TRACE_CTAS, TRACE_HEADER_WORDS, TRACE_NOTE, TRACE_WORDS
from fagen.trace import (
    ARGUMENT_BITS,
    KINDS,
    QUAD,
    SILENT,
    SPILL_BYTES,
    Mark,
    instances_of,
    kind_of,
    longest_run,
    marked,
    marks_of,
    runs_of,
)

needs_nvdisasm = pytest.mark.skipif(sass.nvdisasm() is None, reason=f"no nvdisasm: {sass.INSTALL}")

SCHEDULES: dict[str, tuple[str, dict[str, Any]]] = {
    "fa3": ("fa3", {"head_dim": 64}),
    "causal, static": ("fa3", {"head_dim": 64, "mask": "causal", "parallelism": "persistent_static"}),
    "no overlap": ("fa3", {"head_dim": 64, "overlap": "none"}),
    "uniform": ("fa3", {"roles": "uniform", "overlap": "within", "tile_kv": 96}),
    "stale, fused": (
        "fa3",
        {"head_dim": 64, "reference": "stale", "consumers": 3, "tile_q": 192, "tile_kv": 96, "stages": 4}
        | {"fuse_tiles": True, "overlap": "within"},
    ),
    PAPER_FP8: (PAPER_FP8, {}),
    "Q in registers": (PAPER_FP8, {"head_dim": 256, "tile_kv": 64, "reference": "stale", "stages": 3, "q_operand": "registers"}),
    "Q in registers, fused": (
        PAPER_FP8,
        {"head_dim": 64, "tile_kv": 64, "reference": "stale", "overlap": "within", "fuse_tiles": True, "q_operand": "registers"},
    ),
    "int8_qk": (PAPER_FP8, {"dtype": "int8", "v_dtype": "bf16"}),
    "block scales": (PAPER_FP8, {"scale_granularity": "block", "promote_every": 2, "tile_kv": 128}),
    "fa2": ("fa2", {"head_dim": 64}),
    "fa1": ("fa1", {"head_dim": 64}),
    "standard": ("standard", {"head_dim": 64}),
}
PROBLEM = CheckProblem(1, 300, 500, 2, 1)


@cache
def planned(name: str) -> Plan:
    schedule, changes = SCHEDULES[name]
    return plan(*fagen.load(schedule, **changes), trace=True)


@cache
def traced(name: str, problem: CheckProblem = PROBLEM, turned: bool = False) -> tuple[KernelTrace, ...]:
    p = planned(name)
    launches, words = simulated(p, problem, turned=turned)
    return tuple(read(p, launch, words[launch.name]) for launch in launches)


@pytest.fixture(params=SCHEDULES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# ------------------------------------------------------------------------------------------------------------ the plan


def test_debug_and_trace_exclude_each_other() -> None:
    with pytest.raises(InputError, match=r"^trace: given beside debug"):
        plan(*fagen.load("fa3"), debug=True, trace=True)
    quantised = fagen.load(PAPER_FP8, dtype="bf16", precision="e4m3")
    with pytest.raises(InputError, match=r"^trace: given beside precision 'e4m3'"):
        plan(*quantised, trace=True)


def test_a_trace_plan_is_the_same_program_with_a_buffer(name: str) -> None:
    p = planned(name)
    schedule, changes = SCHEDULES[name]
    normal = plan(*fagen.load(schedule, **changes))
    assert [k.roles for k in p.kernels] == [k.roles for k in normal.kernels]
    assert p.trace and not normal.trace and p.id == normal.id
    for k, n in zip(p.kernels, normal.kernels):
        assert set(k.pointers) - set(n.pointers) == {f"trace_{k.name}"}
        elected = any(r.elect for r in k.roles)
        assert [s.name for s in k.smem if s not in n.smem] == ([TRACE_NOTE] if elected else [])
        assert k.smem_bytes <= p.target.smem_bytes
        space = next(w for w in p.workspaces if w.name == f"trace_{k.name}")
        assert space.count.eval({}) == TRACE_CTAS * len(instances_of(k)) * (TRACE_WORDS + TRACE_HEADER_WORDS)


def test_a_normal_build_has_none_of_it(name: str) -> None:
    schedule, changes = SCHEDULES[name]
    text = emit(plan(*fagen.load(schedule, **changes))).text
    assert not re.search(r"trace|\bmark|clock|globaltimer|smid|lane_place|lane_room", text)  # none of its names means anything else


def test_every_step_kind_is_known() -> None:
    """A new kind of step must be told to the trace: silence would put its time elsewhere. Removals are not traced."""
    containers = (st.Loop, st.Forever, st.Elected, st.If, st.Vote)
    made = {c for c in st.Step.__subclasses__() if c.__module__ in (st.__name__, qs.__name__)} - {
        *containers,
        st.Prefill,
        st.Opaque,
    }
    assert len(made) > 40
    assert made == {*KINDS, *SILENT, st.Wait, st.Mma, st.Arrive, st.NArrive}
    with pytest.raises(fagen.InternalError, match="does not know step kind Step"):
        kind_of(st.Step())


def test_marks_stand_behind_what_takes_time(name: str) -> None:
    """Every step that takes time is in exactly one mark's group; asynchronous ones and waits have a mark of their own, at once."""
    for kernel in planned(name).kernels:
        marks = [m for _, m in marks_of(kernel)]
        assert [m.code for m in marks] == list(range(len(marks)))
        grouped = [s.id for m in marks for s in m.group]
        timed = [s.id for r in kernel.roles for s in st.walk(r.body) if not st.bodies(s) and kind_of(s)]
        assert sorted(grouped) == sorted(timed)
        alone = (st.Wait, st.Sync, st.CtaSync, st.CpWait, st.MmaWait, st.TmaLoad)
        assert all(len(m.group) == 1 for m in marks if any(isinstance(s, alone) for s in m.group))
        for role in marked(kernel).roles:
            rest = [s.id for s in st.walk(role.body) if not isinstance(s, Mark)]
            assert rest == [s.id for r in kernel.roles if r.name == role.name for s in st.walk(r.body)]


def test_few_marks_a_block() -> None:
    """What a block of FlashAttention-3 notes: nine marks a consumer, four the producer."""
    (kernel,) = planned("fa3").kernels
    steady = {r.name: [m for role, m in marks_of(kernel) if role.name == r.name and m.variable == "j"] for r in kernel.roles}
    assert {n: len(m) for n, m in steady.items()} == {"producer": 4, "consumer": 9}


def test_runs_are_what_follows_without_a_jump(name: str) -> None:
    """Walked through by hand: in every block a run goes on until a step in between could make other marks. Each clock is stored once, where
    its mark says, and what tells the run before anybody could take another run's place."""
    for kernel in planned(name).kernels:
        runs, marks = runs_of(kernel), [m for _, m in marks_of(kernel)]
        assert {m.code for run in runs.values() for m in run.marks} == {m.code for m in marks}
        assert {n.code for m in marks for n in m.notes if n.code is not None} == set(runs)
        assert longest_run(kernel) == max(run.words for run in runs.values())
        for code, run in runs.items():
            assert run.words % QUAD == 0 and len({m.word for m in run.marks}) == len(run.marks)
            notes = [(k, n) for k, m in enumerate(run.marks) for n in m.notes]
            names = [n.code for _, n in notes if n.code is not None]
            stored = [(n.word + (n.code is not None) + i, clock) for _, n in notes for i, clock in enumerate(n.clocks)]
            assert sorted(stored) == sorted((m.word, m.clock) for m in run.marks)
            for k, n in notes:
                size = len(n.clocks) + (n.code is not None)
                room = next(r for r in (1, 2, 4) if r >= size)
                assert n.word % room == 0 and n.word + room <= run.words
                assert all(next(i for i, m in enumerate(run.marks) if m.clock == clock) <= k for clock in n.clocks)
                softmax = [i for i, m in enumerate(run.marks) if m.what == "softmax" and m.clock not in n.clocks[:1]]
                first = min((i for i, m in enumerate(run.marks) if m.clock in n.clocks), default=k)
                assert len(names) == 2 or not any(
                    first < i <= k for i in softmax
                )  # none is kept through a softmax, but a vote's other one
            told = [i for i, (_, n) in enumerate(notes) if n.code is not None]
            assert notes[told[0]][1].leaves == run.words and notes[told[0]][1].word == 0
            assert [n.left for _, n in notes] == [0 if i <= told[0] else run.words for i in range(len(notes))]
            assert notes[told[-1]][1].code == code  # the other side of a vote changes the name of the run
            assert len(told) == 1 or notes[told[0]][1].code == run.marks[0].code
            variables = {m.variable for m in run.marks} - {""}
            assert len(variables) <= 1 and {notes[i][1].variable for i in told} == (variables or {""})
            first_named = next((k for k, m in enumerate(run.marks) if m.variable), 0)
            assert notes[told[0]][0] >= first_named and sum(m.what == "tile" for m in run.marks) <= 1


def test_the_steady_loop_is_one_run() -> None:
    """Of the tuned kind too, whose softmax has a vote: what a block's marks cost depends on it."""
    for name in ("fa3", "stale, fused"):
        (kernel,) = planned(name).kernels
        for role in marked(kernel).roles:
            loops = [s for s in st.walk(role.body) if isinstance(s, st.Loop) and s.var == "j"]
            assert loops
            for loop in loops:
                left = [n.leaves for m in st.walk(loop.body) if isinstance(m, Mark) for n in m.notes if n.leaves]
                assert len(left) == 1, role.name


# ------------------------------------------------------------------------------------------------------------ the code


def test_the_code_carries_the_codes(name: str) -> None:
    text = emit(planned(name)).text
    for kernel in planned(name).kernels:
        body = text[text.index(f"\n{kernel.name}(") :]
        body = body[: body.index("\n}\n")]
        stride, last = 4 * TRACE_CTAS * len(instances_of(kernel)), longest_run(kernel)
        marks = [m for _, m in marks_of(kernel)]
        lines = re.findall(r"const u32 (\w+) = clock_low\(\);  // (.*)", body)
        joint = [m for m in marks if m.joint]  # by twos: of `then`, of `orelse`
        groups = [(m, joint[k - 1]) if (k := joint.index(m) if m.joint else 0) % 2 else (m,) for m in marks if m not in joint[::2]]
        assert [clock for clock, _ in lines] == [m.clock for m, *_ in groups]
        for (_, comment), of in zip(lines, groups):
            assert all(m.what in comment and all(s.id in comment for s in m.group) for m in of) and len({m.word for m in of}) == 1
        stores = re.findall(r"\bnote(\d)<(\d+)>\(p\.\w+, (?:lane_place|place_shared\(\w+\)), (.*)\);", body)
        notes = [n for m in marks if not m.joint for n in m.notes]
        notes += [n for m in joint[::2] for n in m.notes if n.code is not None]  # only the side's name for the run
        notes += [n for m in joint[1::2] for n in m.notes if n.code is None]
        want = []
        for n in notes:
            told = [] if n.code is None else [f"{n.code << ARGUMENT_BITS:#x}u" + (f" + {n.variable}" if n.variable else "")]
            words = [*told, *n.clocks]
            at = stride * (last - QUAD * (n.word // QUAD + 1) + n.left) + 4 * (n.word % QUAD)
            want.append((str(len(words)), str(at), ", ".join(words)))
        assert sorted(stores) == sorted(want)
        left = [int(x) for x in re.findall(r"max\((?:lane_place|place_shared\(\w+\)) - (\d+), -\d+\)", body)]
        assert left == [stride * n.leaves for m in marks for n in m.notes if n.leaves]
        ends = len(re.findall(r"\bstart_lane<", body)), len(re.findall(r"\bfinish_lane<", body))
        assert ends == (len(kernel.roles),) * 2


TUNED = {"parallelism": "persistent_static", "overlap": "within", "reference": "stale", "tile_kv": 128}
"""Of the tuned schedule for head_dim 128, full, to fa3."""


@cache
def compiled(schedule: str, trace: bool, **changes: Any) -> Built:
    p = plan(*fagen.load(schedule, **changes), trace=trace)
    return build(p, emit(p, schedule))  # raises where a promise is broken: counts, serialised products, advisories


@needs_nvdisasm
@pytest.mark.parametrize("schedule", ["fa3", PAPER_FP8, "fa2", "fa1", "standard"])
def test_a_trace_build_keeps_the_promises_and_hardly_spills(schedule: str) -> None:
    allowed = SPILL_BYTES if schedule == PAPER_FP8 else 0  # its transposing warps have no register to spare
    kernels = compiled(schedule, True).report.kernels
    assert len(kernels) == (3 if schedule == "standard" else 1)
    for k, normal in zip(kernels, compiled(schedule, False).report.kernels):
        assert max(k.spill_stores, k.spill_loads, k.stack_bytes) <= allowed
        assert k.serialised is False or not any(n in k.expected and k.expected[n] for n in ("HGMMA", "QGMMA"))
        assert k.expected == normal.expected
        assert set(k.differing) <= ({"STL", "LDL"} if allowed else set())


def steady_loop(built: Built) -> list[sass.Instruction]:
    """The shortest loop with products. A jump back without a condition ends another try of a wait, which stands behind everything."""
    code = (sass.disassemble(built.cubin) or {})["attention"]
    loops = [code[x.target : i + 1] for i, x in enumerate(code) if x.predicate and x.target is not None and x.target <= i]
    return list(min((c for c in loops if any(x.is_wgmma for x in c)), key=len))


NARROW = {"head_dim": 64, "tile_q": 256, "tile_kv": 64, "consumers": 4, "stages": 4, "stages_q": 2} | {
    k: v for k, v in TUNED.items() if k not in ("tile_kv", "parallelism")
}
"""The tuned schedule of the shortest blocks, whose consumers have the fewest registers."""


@needs_nvdisasm
@pytest.mark.parametrize("changes", [{}, TUNED, NARROW], ids=["fa3", "tuned", "narrow"])
def test_a_mark_is_a_clock(changes: dict[str, Any]) -> None:
    """In the loop over key blocks a mark is one instruction, and a jump passes over the stores in every warp that writes no lane, which are
    at least three of four: what a trace costs follows from that."""
    normal, traced = (steady_loop(compiled("fa3", trace, **changes)) for trace in (False, True))
    (kernel,) = compiled("fa3", True, **changes).plan.kernels
    (consumer,) = (r for r in marked(kernel).roles if r.name == "consumer")
    (loop,) = (s for s in st.walk(consumer.body) if isinstance(s, st.Loop) and s.var == "j")
    marks = [s for s in st.walk(loop.body) if isinstance(s, Mark)]
    clocks = [m for m in marks if not m.joint] + [m for m in marks if m.joint][1::2]  # both sides of a vote share their last one
    stores = sum(len([n for n in m.notes if m in clocks or n.code is not None]) for m in marks)
    count = {op: sum(x.base == op for x in traced) - sum(x.base == op for x in normal) for op in ("CS2R", "STG", "LDL", "STL")}
    assert count == {"CS2R": len(clocks), "STG": stores, "LDL": 0, "STL": 0}
    assert all(x.predicate for x in traced if x.base == "STG")
    others = others_way(traced), others_way(normal)
    assert len(others[0]) - len(others[1]) <= len(clocks) + 8
    jumps = [sum(x.base == "BRA" for x in way) for way in others]
    exact = 2 if changes else 0  # of the vote's other side
    assert jumps[0] - jumps[1] == exact + (3 if changes is NARROW else 2)  # with few registers one more


def others_way(loop: list[sass.Instruction]) -> list[sass.Instruction]:
    """What a warp that writes no lane executes of a loop: it jumps over every short part that has a store to the trace."""
    way, i, first = (
        list[sass.Instruction](),
        0,
        loop[-1].target or 0,
    )  # targets count in the whole code; a loop's last one is its first
    while i < len(loop):
        way.append(loop[i])
        to = 0 if loop[i].target is None else loop[i].target - first
        i = to if i < to < i + 40 and any(x.base == "STG" for x in loop[i:to]) else i + 1
    return way


@needs_nvdisasm
@pytest.mark.parametrize(("schedule", "batch"), [("fa3", 88), (PAPER_FP8, 112)])
def test_the_machine_code_keeps_the_order_of_the_marks(schedule: str, batch: int) -> None:
    """All exponentials of a block stand between the two clock readings around its softmax, and each wait for products between those around it:
    else the spans would be of something else."""
    built = compiled(schedule, True)
    code = (sass.disassemble(built.cubin) or {})["attention"]
    clocks = [i for i, x in enumerate(code) if x.op.startswith("CS2R") and x.operands.endswith("CLOCKLO")]
    between = [code[a:b] for a, b in pairwise(clocks)]
    assert [n for n in (sum(x.op == "MUFU.EX2" for x in part) for part in between) if n] == [batch, batch + 2]  # two are alpha
    waits = [n for n in (sum(x.op.startswith("WARPGROUP.DEPBAR") for x in part) for part in between) if n]
    assert waits == [1] * built.report.kernels[0].expected["WARPGROUP.DEPBAR"]
    assert not [f for f in built.report.kernels[0].faults if f.startswith("early-wait")]


@needs_nvdisasm
def test_a_spill_above_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    p = plan(*fagen.load("fa3", head_dim=256, reference="stale", tile_kv=80), trace=True)
    source = emit(p, "spilling")
    (k,) = build(p, source).report.kernels
    assert 0 < max(k.spill_stores, k.spill_loads, k.stack_bytes) <= SPILL_BYTES
    monkeypatch.setattr("fagen.trace.SPILL_BYTES", 0)
    with pytest.raises(CompileError, match="bytes of spill"):
        build(p, source)


def test_built_files_tell_a_trace_build(tmp_path: Any) -> None:
    from fagen.compile import load_built, write_built

    built = compiled("fa2", True)
    write_built(built, tmp_path, "x")
    assert load_built(tmp_path, "x").plan == built.plan
    write_built(compiled("fa2", False), tmp_path, "x")
    assert "trace" not in json.loads((tmp_path / "x.json").read_text()) and not load_built(tmp_path, "x").plan.trace


# ------------------------------------------------------------------------------------------------------------ reading


def test_spans_fill_a_lane_and_tracks_do_not_overlap(name: str) -> None:
    for trace in traced(name):
        assert abs(trace.cycles_per_us / (1000 * CYCLES_PER_NS) - 1) < 0.01
        for cta in trace.ctas:
            for lane in cta.lanes:
                assert lane.spans and not lane.dropped
                assert all(a.end == b.start for a, b in pairwise(lane.spans))
                assert all(0 <= s.start < s.end < 1 << 24 for s in lane.spans)
                assert all(s.what in COLOURS for s in lane.spans)
            for track in (*cta.products, *cta.loads):
                assert all(a.end <= b.start for a, b in pairwise(track.spans)), track.name
                assert all(s.start <= s.end for s in track.spans)


def test_ctas_have_their_places() -> None:
    """CTAs start 1500 cycles, 1000 ns, after one another; SMs are numbered from 40 on."""
    (trace,) = traced("fa2")
    assert [(c.cta, c.sm, c.start_ns) for c in trace.ctas] == [(i, 40 + i, 1000 * i) for i in range(4)]


def blocks(problem: CheckProblem, tile_kv: int) -> int:
    return -(-problem.sk // tile_kv)


@pytest.mark.parametrize("name", ["fa3", "no overlap", "uniform", "stale, fused", PAPER_FP8, "block scales"])
def test_every_tile_and_block_is_there(name: str) -> None:
    p, (trace,) = planned(name), traced(name)
    n = blocks(PROBLEM, p.schedule.tile_kv)
    tiles = {t.tile for cta in trace.ctas for t in cta.lanes[0].tiles}
    assert tiles == set(range(2 * -(-PROBLEM.sq // p.schedule.tile_q)))
    for cta in trace.ctas:
        mine = [t.tile for t in cta.lanes[-1].tiles]
        want = [(tile, block) for tile in mine for block in reversed(range(n))]
        for track in cta.products:
            assert [s.block for s in track.spans] == [block for _, block in want], track.name
            assert {s.name for s in track.spans} == {"qk" if track.name.endswith("S") else "pv"}
        assert [(s.tile, s.block) for s in cta.products[0].spans] == want
        by_ring: dict[str, list[Span]] = {}
        for track in cta.loads:
            by_ring.setdefault(track.name.partition("[")[0], []).extend(track.spans)
        for ring, spans in by_ring.items():
            found = [(s.tile, s.block) for s in sorted(spans, key=lambda s: s.start)]
            assert found == ([(tile, None) for tile in mine] if ring == "Q" else want), ring


def test_what_belongs_to_the_tile_before_is_told_so() -> None:
    """Fused tiles: the last product and the epilogue of a tile stand behind the first product of the next one."""
    (trace,) = traced("stale, fused")
    for lane in trace.ctas[0].lanes[1:]:
        first, second, *_ = (t.tile for t in lane.tiles)
        order = [(s.name, s.tile) for s in lane.spans if s.name in ("qk", "pv", "store_row_lse")]
        at = order.index(("qk", second))
        assert order[at + 1 : at + 3] == [("pv", first), ("store_row_lse", first)]


def test_either_side_of_a_vote_is_read() -> None:
    """Scores that grow in the order of the walk take the exact side in every block, random ones the other; a block's other marks are the same."""
    steps = {}
    for inputs in ("normal", "growing"):
        (trace,) = traced(
            "stale, fused", replace(PROBLEM, inputs=inputs), turned=True
        )  # a kernel walks from the last key to the first
        spans = [s for cta in trace.ctas for lane in cta.lanes[1:] for s in lane.spans if ".steady." in s.step]
        steps[inputs] = Counter(s.step.split(".steady.")[1] for s in spans)
    exact = {"exact.online_softmax", "exact.pack", "exact.mma_wait", "exact.rescale"}
    normal, growing = steps["normal"], steps["growing"]
    assert {s for s in normal if s.startswith("exact")} == {"exact.else.mma_wait"}
    assert {s for s in growing if s.startswith("exact")} >= exact and len({growing[s] for s in exact}) == 1
    assert growing["exact.pack"] > growing["exact.else.mma_wait"]
    for counts in (normal, growing):
        assert counts["exact.pack"] + counts["exact.else.mma_wait"] == counts["qk"]
    assert all(growing[s] == n for s, n in normal.items() if not s.startswith("exact"))


def test_a_product_is_in_flight_from_its_issue_to_its_wait() -> None:
    (trace,) = traced("fa3")
    for cta in trace.ctas:
        for track in cta.products:
            spans = cta.lanes[track.lane].spans
            frag = track.name[-1]
            issues = [s.end for s in spans if s.what == "issue" and (s.name == "qk") == (frag == "S")]
            waits = [s.end for s in spans if s.what == "wait product" and frag in s.name.split("_")[1:]]
            assert [(s.start, s.end) for s in track.spans] == list(zip(issues, waits))


def test_overlap_is_the_programs() -> None:
    """Under its own product runs the softmax where the program says so: with overlap both, not with none."""
    both, none = (measure(traced(n)[0]) for n in ("fa3", "no overlap"))
    assert all(x.under_own > 0.5 for x in both.softmax) and all(x.under_own == 0 for x in none.softmax)
    assert {x.lane for x in both.softmax} == {"consumer 0", "consumer 1", "consumer 2"}
    assert 0 < both.loads_under_work < 1 and 0 < both.products_share < 1
    assert both.tiles == 12 and both.tile_cycles[0] <= both.tile_cycles[1] <= both.tile_cycles[2]
    for shares in both.time.values():
        assert sum(shares.values()) == pytest.approx(1, abs=1e-4)


def test_kernels_without_asynchronous_products() -> None:
    for trace in traced("standard"):
        m = measure(trace)
        assert m.products_share is None and m.loads_cycles is None
        assert all(x.under_any == 0 for x in m.softmax)


# by hand: two consumers for 100 cycles ---------------------------------------------------------------------------------


def by_hand() -> KernelTrace:
    def span(start: int, end: int, what: str) -> Span:
        return Span(start, end, what, what, "step")

    producer = Lane("producer", "producer", 0, (span(0, 10, "load"), span(10, 100, "wait slot")), (), 0)
    first = Lane("consumer 0", "consumer", 0, (span(0, 50, "wait data"), span(50, 90, "softmax"), span(90, 100, "rescale")), (), 0)
    second = Lane("consumer 1", "consumer", 1, (span(0, 20, "softmax"), span(20, 100, "wait product")), (), 0)
    products = (Track("consumer 0: S", 1, (span(40, 60, "product"),)), Track("consumer 1: O", 2, (span(10, 80, "product"),)))
    loads = (
        Track("K[0]", 0, (span(10, 30, "in flight"),)),
        Track("K[1]", 0, (span(0, 15, "in flight"), span(85, 95, "in flight"))),
    )
    from fagen.explore.trace import CtaTrace

    return KernelTrace("attention", (CtaTrace(0, 7, 0, (producer, first, second), products, loads),), 1000.0)


def test_shares_by_hand() -> None:
    m = measure(by_hand())
    first, second = m.softmax
    assert (first.lane, first.cycles) == ("consumer 0", 40)
    assert (first.under_others, first.under_own, first.under_any) == (30 / 40, 10 / 40, 30 / 40)
    assert (second.under_others, second.under_own, second.under_any) == (0, 10 / 20, 10 / 20)
    assert (m.loads_cycles, m.loads_under_work) == (40, 1.0)  # 0 to 30 and 85 to 95; work from 0 to 80 and 50 to 100
    assert m.products_share == 0.7
    assert m.time["consumer"] == {"wait data": 0.25, "softmax": 0.3, "rescale": 0.05, "wait product": 0.4}


def test_cut_lanes_count_up_to_the_shortest() -> None:
    whole = by_hand()
    (cta,) = whole.ctas
    cut = replace(cta.lanes[2], spans=cta.lanes[2].spans[:1], dropped=3)
    m = measure(replace(whole, ctas=(replace(cta, lanes=(*cta.lanes[:2], cut)),)))
    assert m.dropped == 3 and [x.lane for x in m.softmax] == ["consumer 1"]
    assert m.time["producer"] == {"load": 0.5, "wait slot": 0.5} and m.loads_cycles == 20


def test_intervals() -> None:
    assert union([(5, 7), (0, 2), (1, 4), (7, 9)]) == [(0, 4), (5, 9)]
    assert length([(0, 4), (5, 9)]) == 8
    assert common([(0, 4), (5, 9)], [(3, 6), (8, 20)]) == 3


# damaged and cut buffers -----------------------------------------------------------------------------------------------


@cache
def buffer() -> tuple[Plan, Any, Any]:
    p = planned("fa3")
    (launch,), words = simulated(p, PROBLEM)
    return p, launch, words["attention"]


def headers_of(words: Any, p: Plan, room: int = TRACE_WORDS) -> Any:
    lanes = TRACE_CTAS * len(instances_of(p.kernels[0]))
    return words[room * lanes :].reshape(lanes, TRACE_HEADER_WORDS)


def first_word(words: Any, p: Plan, lane: int) -> Any:
    """A view of it: the first run's of a lane."""
    lanes = TRACE_CTAS * len(instances_of(p.kernels[0]))
    return words[: TRACE_WORDS * lanes].reshape(-1, lanes, QUAD)[-1, lane, :1]


def test_marks_without_room_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    p, (whole,) = planned("fa3"), traced("fa3")
    room = 80
    for module in ("fagen.explore.trace.reader", "trace_source"):
        monkeypatch.setattr(f"{module}.TRACE_WORDS", room)
    (launch,), words = simulated(p, PROBLEM)
    cut = read(p, launch, words["attention"])
    assert whole.dropped == 0 < cut.dropped
    longest = longest_run(p.kernels[0])
    noted = headers_of(words["attention"], p, room)[:, 7]
    for lane, (full, kept) in enumerate(zip((x for c in whole.ctas for x in c.lanes), (x for c in cut.ctas for x in c.lanes))):
        assert kept.spans == full.spans[: len(kept.spans)] and (kept.dropped > 0) == (len(kept.spans) < len(full.spans))
        words_read = int(noted[lane]) - kept.dropped
        assert words_read <= room - longest
        assert not kept.dropped or words_read > room - 2 * longest  # it stops where the longest run might not have room
    for full, kept in zip((x for c in whole.ctas for x in c.products), (x for c in cut.ctas for x in c.products)):
        assert kept.spans == full.spans[: len(kept.spans)]  # what had no end in time is not shown
    assert measure(cut).dropped == cut.dropped


def test_damage_is_named() -> None:
    p, launch, words = buffer()

    def damaged(change: Any) -> Any:
        copy = words.copy()
        change(copy)
        return copy

    lanes = TRACE_CTAS * len(instances_of(p.kernels[0]))
    cases = {
        r"words: 7 words, the trace of kernel attention has \d+": words[:7],
        r"consumer 0 of CTA 0 never came to its end": damaged(lambda w: headers_of(w, p)[1, 4:].fill(0xFFFFFFFF)),
        r"mark 0 of producer in CTA 0 has code 1023": damaged(lambda w: first_word(w, p, 0).fill(1023 << ARGUMENT_BITS)),
        r"mark 0 of consumer 0 in CTA 0 has code 0": damaged(lambda w: first_word(w, p, 1).fill(0)),
        r"consumer 1 in CTA 0 ends within a run of marks": damaged(lambda w: headers_of(w, p)[2, 7:].__isub__(1)),
        r"ran for \d+ ns, too short": damaged(lambda w: headers_of(w, p)[:, 4:6].__setitem__(..., headers_of(w, p)[:, 0:2])),
    }
    assert lanes == 16
    for message, bad in cases.items():
        with pytest.raises(InputError, match=message):
            read(p, launch, bad)


def test_nothing_recorded_is_named() -> None:
    p, launch, words = buffer()
    with pytest.raises(InputError, match="CTA 2 is not among the 2 of kernel attention"):
        read(p, replace(launch, scalars=(*launch.scalars[:-2], 2, launch.scalars[-1])), words)


# ------------------------------------------------------------------------------------------------------------ files


def test_perfetto_is_valid_and_names_lanes(name: str) -> None:
    traces = [(f"title {i}", t) for i, t in enumerate(traced(name))]
    data = json.loads(json.dumps(perfetto(traces, {"gpu": "none"}), allow_nan=False))
    assert data["displayTimeUnit"] == "ns" and data["otherData"] == {"gpu": "none"}
    by_thread: dict[tuple[int, int], list[dict[str, Any]]] = {}
    names: dict[tuple[int, int], str] = {}
    for event in data["traceEvents"]:
        at = event["pid"], event["tid"]
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                names[at] = event["args"]["name"]
            continue
        assert event["ph"] == "X" and event["dur"] >= 0 and event["ts"] >= 0 and event["cat"] and event["args"]["step"]
        by_thread.setdefault(at, []).append(event)
    assert by_thread.keys() <= names.keys()
    assert len({pid for pid, _ in names}) == sum(len(t.ctas) for _, t in traces)
    lanes = {lane.name for _, t in traces for cta in t.ctas for lane in cta.lanes}
    assert lanes <= set(names.values())
    for events in by_thread.values():  # no overlap within a thread: Perfetto nests what overlaps
        ordered = sorted(events, key=lambda e: e["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] + 2e-5 for a, b in pairwise(ordered))


def test_the_picture_is_self_contained_and_complete(name: str) -> None:
    trace = traced(name)[0]
    text = picture([panel("first <&>", "note", trace, 0, 10**9), panel("second", "note", trace, 1, 2000)])
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg" and "href" not in text and "url(" not in text
    words = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")]
    cta = trace.ctas[0]
    assert {"first <&>", "second", *(lane.name for lane in cta.lanes)} <= set(words)
    titles = [t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}title")]
    for what in {s.what for lane in cta.lanes for s in lane.spans}:
        assert COLOURS[what][1] in words and any(t.startswith(what) for t in titles)
    width = float(root.attrib["width"])
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        if rect.attrib["width"] != "100%":
            assert float(rect.attrib["x"]) >= 0 and float(rect.attrib["x"]) + float(rect.attrib["width"]) <= width


def test_a_panel_begins_with_its_tile() -> None:
    (trace,) = traced("fa3")
    begins = [min(lane.tiles[i].start for lane in trace.ctas[0].lanes) for i in range(2)]
    assert [panel("", "", trace, i, 500).start for i in (0, 1, 9)] == [begins[0], begins[1], panel("", "", trace, 99, 500).start]
    assert panel("", "", trace, 0, 500).cycles == 500
