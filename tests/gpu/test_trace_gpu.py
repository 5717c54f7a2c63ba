"""Trace builds on a device: the same bits as the normal build, a timeline that holds together, and what tracing costs."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import fagen
from fagen.cli import run
from fagen.compile import Built, build
from fagen.emit import emit
from fagen.explore.trace import measure
from fagen.explore.trace.run import MOST_OVERHEAD, Run, trace_gpu
from fagen.plan import Problem, plan
from fagen.plan.kernel import TRACE_CTAS, TRACE_WORDS
from fagen.trace import runs_of

pytestmark = pytest.mark.gpu

STALE = {"reference": "stale", "tile_kv": 128}
TUNED = {**STALE, "overlap": "within", "parallelism": "persistent_static"}


def pair(name: str, **changes: Any) -> tuple[Built, Built]:
    attention, schedule = fagen.load(name, **changes)
    plans = [plan(attention, schedule, trace=trace) for trace in (False, True)]
    normal, traced = (build(p, emit(p, f"{name}{'.trace' if p.trace else ''}")) for p in plans)
    return normal, traced


def traced(name: str, problem: Problem, tmp_path: Path, **changes: Any) -> Run:
    return trace_gpu([pair(name, **changes)], problem, bundles=tmp_path / "repro")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("fa3", {}),
        ("fa3", {"head_dim": 64, "mask": "causal", "parallelism": "persistent_dynamic"}),
        ("fa3", STALE),
        ("fa3", {"roles": "uniform", "overlap": "within", "tile_kv": 96}),
        ("fa3_fp8", {}),
        ("fa2", {}),
        ("fa1", {}),
        ("standard", {}),
    ],
    ids=str,
)
def test_a_timeline_holds_together(device: Any, tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    """CTAs that own a tile or several; spans without gaps; products and loads in their places; a clock rate that a GPU has."""
    found = traced(name, Problem(2, 1500, 1100, 16, 8), tmp_path, **changes).traced[0]
    assert found.same_bits
    for trace in found.kernels:
        assert len(trace.ctas) == TRACE_CTAS and not trace.dropped
        assert 300 < trace.cycles_per_us < 2500
        assert len({cta.sm for cta in trace.ctas}) > 1
        for cta in trace.ctas:
            assert -1e6 < cta.start_ns < 1e6
            for lane in cta.lanes:
                assert lane.spans and all(a.end == b.start and a.start <= a.end for a, b in pairwise(lane.spans))
            for track in (*cta.products, *cta.loads):
                assert track.spans and all(a.end <= b.start for a, b in pairwise(track.spans)), track.name
        m = measure(trace)
        if m.softmax and m.products_share is not None:
            assert 0.2 < m.products_share <= 1
            assert all(0 <= x.under_any <= 1 and x.under_any >= max(x.under_own, x.under_others) for x in m.softmax)


def test_where_products_stand_still_the_softmax_is_not_under_its_own(device: Any, tmp_path: Path) -> None:
    """overlap none waits for every product: only another warpgroup's may run under a softmax. With both, its own does."""
    none, both = (
        measure(traced("fa3", Problem(1, 2048, 2048, 16, 16), tmp_path, **c).traced[0].kernels[0])
        for c in ({"overlap": "none"}, {})
    )
    assert all(x.under_own == 0 for x in none.softmax)
    assert all(x.under_own > 0.2 for x in both.softmax)


def test_what_has_no_room_is_counted(device: Any, tmp_path: Path) -> None:
    """Small key blocks fill a lane: what is kept is whole, and behind it there is no room for the longest run."""
    changes = {"head_dim": 64, "tile_q": 128, "consumers": 2, "tile_kv": 32}
    found = traced("fa3", Problem(1, 32768, 65536, 8, 1), tmp_path, **changes).traced[0]
    assert found.same_bits
    (trace,) = found.kernels
    (kernel,) = plan(*fagen.load("fa3", **changes), trace=True).kernels
    for cta in trace.ctas:
        consumers = [lane for lane in cta.lanes if lane.role == "consumer"]
        assert all(lane.dropped for lane in consumers)
        for lane in cta.lanes:
            assert all(a.end == b.start and a.start <= a.end for a, b in pairwise(lane.spans))
        turn = max(
            (r for r in runs_of(kernel).values() if r.role == "consumer"), key=lambda r: len(r.marks)
        )  # of the loop over blocks
        whole = TRACE_WORDS * len(turn.marks) / turn.words
        for lane in consumers:
            assert 0.97 * whole < len(lane.spans) < 1.03 * whole
            blocks = [s.block for s in lane.spans if s.name == "qk"]
            assert all(a - b in (1, 1 - 65536 // 32) for a, b in pairwise(blocks))


@pytest.mark.parametrize("changes", [{}, STALE, TUNED], ids=["running", "stale", "tuned"])
def test_tracing_costs_little(device: Any, tmp_path: Path, changes: dict[str, Any]) -> None:
    found = traced("fa3", Problem(4, 4096, 4096, 16, 16), tmp_path, **changes).traced[0]
    for cost in (found.overhead, found.cta_overhead):
        assert cost is not None, found.why_not
        assert cost.median <= MOST_OVERHEAD, (
            f"{found.normal_ms:.4f} ms, {found.traced_ms:.4f} traced, {found.writing_ms:.4f} writing"
        )


def test_the_command_on_carried_kernels(device: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "built")
    assert run(["build", "fa3", "--trace", "-o", folder]) == 0
    output, svg = tmp_path / "trace.json", tmp_path / "trace.svg"
    capsys.readouterr()
    command = ["trace", "fa3", "--shape", "16,16,16,1024,1024", "--from", folder, "-o", str(output), "--svg", str(svg), "--json"]
    assert run(command) == 0
    (kernel,) = json.loads(capsys.readouterr().out)["kernels"]
    assert kernel["same_bits"] and kernel["traces"][0]["tiles"] > 10
    assert len(json.loads(output.read_text())["traceEvents"]) > 1000 and svg.read_text().startswith("<svg")
