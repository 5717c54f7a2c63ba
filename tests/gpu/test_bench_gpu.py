"""Bench on a real GPU: what it times is right, repeats, and comes back whole from its process.

Kernels are compiled here, or taken from FAGEN_TEST_KERNELS, a folder that `fagen build fa3 --variants -o DIR` wrote, where this machine
should not compile.
"""

from __future__ import annotations

import os

import pytest

from fagen.cli import common
from fagen.compile import write_built
from fagen.explore import bench_lab
from fagen.explore.bench import run_bench
from fagen.explore.bench_result import BenchSpec, CaseSpec, KernelRef
from fagen.explore.bench_watch import run_watched
from fagen.launch import Kernel
from fagen.plan.kernel import Problem

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(torch, tmp_path_factory):
    return os.environ.get("FAGEN_TEST_KERNELS") or tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module")
def spec(folder):
    """spec(problem, mask=…, labels=…, …): fa3 at head_dim 64 under each of the labels."""

    def make(problem, mask="causal", labels=("fa3",), peers=("cudnn", "fa2", "fa3"), rounds=6, sustained=False, inputs="normal"):
        (item,) = common.select(["fa3"], ["head_dim=64", f"mask={mask}"])
        if "FAGEN_TEST_KERNELS" not in os.environ:
            write_built(common.built(item), folder, item.name)
        refs = tuple(KernelRef(label, str(folder), item.name) for label in labels)
        return BenchSpec((CaseSpec(item.attention, problem, refs),), peers, rounds, sustained, 0, inputs)

    return make


def test_a_case_beside_its_peers(spec):
    cases = []
    result = run_watched(spec(Problem(4, 2048, 2048, 32, 32), sustained=True), cases.append)
    assert result.ok and result.cases == tuple(cases)
    assert 100 < result.ceilings.gemm_tflops.median < 2000 and 0.5 < result.ceilings.copy_tbs.median < 10
    (case,) = cases
    rows = {row.peer or row.function: row for row in case.rows}
    for name in ("cudnn", "fa2"):
        assert rows[name].outcome == "timed", rows[name].reason
    timed = [row for row in case.rows if row.outcome == "timed"]
    for row in timed:
        assert row.error_ratio is not None and row.error_ratio <= 1
        assert len(row.burst.samples_ms) == 6 and row.sustained is not None
        assert 1.5 < row.burst.launches * row.burst.ms.median < 10, "a burst is some 4 ms"
        assert row.burst.tflops.low <= row.burst.tflops.median <= row.burst.tflops.high
    ours = case.rows[0]
    assert ours.function == "fa3" and ours.kind == "schedule" and ours.burst.ratio is not None
    best = min((r for r in timed if r.kind == "peer"), key=lambda r: r.burst.ms.median)
    assert ours.burst.best_peer == best.function
    assert ours.burst.ratio.median == pytest.approx(best.burst.ms.median / ours.burst.ms.median, rel=0.05)
    if result.machine.sensors == "NVML":
        assert 200 < ours.burst.sm_mhz < 3000 and ours.sustained.sm_mhz is not None


def test_the_same_kernel_twice_is_equally_fast(spec):
    result = run_watched(spec(Problem(4, 2048, 2048, 32, 32), labels=("a", "b"), peers=(), rounds=12))
    a, b = (row.burst.ms.median for row in result.cases[0].rows)
    assert a == pytest.approx(b, rel=0.03)


def test_unequal_lengths_are_timed_without_the_peers_that_cannot(spec):
    result = run_watched(spec(Problem(2, 1000, 3000, 8, 2), peers=("cudnn", "fa2"), rounds=3))
    fa3, *others = result.cases[0].rows
    assert fa3.outcome == "timed" and fa3.burst.ratio is None
    assert [row.outcome for row in others] == ["absent", "absent"] and all("top-left" in row.reason for row in others)


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("kind", ["sink", "growing"])
def test_everybody_is_right_on_unkind_inputs(spec, kind, mask):
    """The reference of a check is float64: a peer that is wrong here would not be timed, and nothing compared."""
    result = run_watched(spec(Problem(1, 4096, 4096, 4, 4), mask=mask, rounds=2, inputs=kind))
    assert result.inputs == kind and result.ok
    assert {row.outcome for row in result.cases[0].rows} <= {"timed", "absent"}, [row.reason for row in result.cases[0].rows]


@pytest.mark.parametrize("fault", ["wrong", "unwritten"])
def test_a_wrong_kernel_is_not_timed(spec, monkeypatch, fault):
    class Wrong(Kernel):
        def __call__(self, q, k, v, out=None, lse=None, **options):
            found = super().__call__(q, k, v, out=out, lse=lse, **options)
            out[0, 0, 0] += 1 if fault == "wrong" else float("nan")
            return found

    monkeypatch.setattr(bench_lab, "Kernel", Wrong)
    result = run_bench(spec(Problem(1, 512, 512, 4, 4), peers=("fa2",), rounds=2))
    ours, fa2 = result.cases[0].rows
    assert ours.outcome == "wrong" and ours.burst is None and ours.reason
    assert fa2.outcome == "timed" and not result.ok
