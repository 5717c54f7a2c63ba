"""Bench without a GPU: statistics, rounds, counts, results, and the command on a made-up laboratory."""

from __future__ import annotations

import json
import math
import os
import sys
import types
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fagen
from fagen import Attention, InputError, LaunchError, driver, tuned
from fagen.cli import bench as cli_bench
from fagen.cli import common, needed
from fagen.cli import run as run_cli
from fagen.compile import write_built
from fagen.explore import bench, bench_inputs, bench_lab, bench_watch, peers, timing
from fagen.explore.ablation import ABLATIONS, ablations
from fagen.explore.bench_result import (
    BenchResult,
    BenchSpec,
    CaseResult,
    CaseSpec,
    Ceilings,
    KernelRef,
    Machine,
    Prediction,
    Row,
)
from fagen.explore.summary import summaries
from fagen.explore.table import markdown_table
from fagen.explore.timing import GraphTask, Interval, Reading, Sample, TorchClock
from fagen.oracle import cast
from fagen.plan.kernel import Problem

HD128 = Attention(head_dim=128)
CAUSAL = Attention(head_dim=128, mask="causal")


# statistics ---------------------------------------------------------------------------------------------------------------


def covered(n: int, k: int) -> float:
    """Probability that the median lies in [x_k, x_(n+1-k)]."""
    return 1 - 2 * sum(math.comb(n, i) for i in range(k)) / 2**n


@pytest.mark.parametrize(
    ("n", "k"),
    [(1, 1), (2, 1), (3, 1), (5, 1), (6, 1), (8, 1), (9, 2), (10, 2), (11, 2), (12, 3), (15, 4), (30, 10)],
)
def test_interval_is_the_tabulated_one(n, k):
    found = timing.interval(range(n, 0, -1))
    assert (found.low, found.high) == (k, n + 1 - k)
    assert found.median == (n + 1) / 2
    assert found.confidence == pytest.approx(covered(n, k))


@given(st.lists(st.floats(0.1, 1e6), min_size=6, max_size=60))
@settings(max_examples=60, deadline=None)
def test_interval_keeps_95_per_cent_and_is_the_narrowest_that_does(samples):
    found, x = timing.interval(samples), sorted(samples)
    assert found.low <= found.median <= found.high
    assert found.confidence >= 0.95
    k = next(k for k in range(1, len(x)) if covered(len(x), k + 1) < 0.95)
    assert (found.low, found.high) == (x[k - 1], x[-k])


def test_interval_below_six_samples_says_what_it_covers():
    assert timing.interval([3.0, 1.0, 2.0]) == Interval(2.0, 1.0, 3.0, 0.75)
    with pytest.raises(ValueError, match="no samples"):
        timing.interval([])


def test_interval_of_a_rate_swaps_the_ends():
    assert Interval(2.0, 1.0, 4.0, 0.97).map(lambda ms: 8 / ms) == Interval(4.0, 2.0, 8.0, 0.97)


# rounds -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_rounds_rotate_and_reverse(n):
    rounds = [timing.order(n, r) for r in range(2 * n)]
    assert all(sorted(r) == list(range(n)) for r in rounds)
    for function in range(n):
        assert sorted(r.index(function) for r in rounds) == sorted(2 * list(range(n))), "each place, equally often"
    if n > 2:
        before = {(r[i - 1], r[i]) for r in rounds for i in range(1, n)}
        assert all(len({a for a, b in before if b == f}) > 1 for f in range(n)), "no function always follows the same other"


class FakeTask:
    def __init__(self, name: str, ms: float, launches: int = 10):
        self.name, self.ms, self.launches = name, ms, launches

    def once(self) -> None: ...

    def replay(self) -> None: ...


class FakeClock:
    """Every measurement takes what the task says, and `drift` times its place in the whole run more."""

    def __init__(self, drift: float = 0.0):
        self.drift, self.log, self.rests = drift, [], []

    def rest(self, seconds):
        self.rests.append(seconds)

    def measure(self, task, *, warm_replays, replays):
        self.log.append((task.name, warm_replays, replays))
        return Sample(task.ms * (1 + self.drift * len(self.log)), 1500.0 if warm_replays else 1900.0)


def test_burst_rests_before_every_measurement_and_cancels_drift():
    tasks = [FakeTask("a", 1.0), FakeTask("b", 1.0), FakeTask("c", 1.0)]
    clock = FakeClock(drift=0.01)
    samples = timing.burst(tasks, clock, rounds=6)
    assert clock.rests == [0.015] * 18
    assert [name for name, _, _ in clock.log[:9]] == list("abccbabca")
    assert {entry[1:] for entry in clock.log} == {(0, 1)}
    sums = [sum(s.ms for s in of) for of in samples]
    assert sums == pytest.approx([sums[0]] * 3), "the same function three times is equally fast"


def test_sustained_warms_up_without_a_rest():
    clock = FakeClock()
    samples = timing.sustained([FakeTask("a", 0.4, launches=10), FakeTask("b", 300.0, launches=1)], clock, 2, [0.4, 300.0])
    assert clock.rests == []
    assert clock.log[:2] == [("a", 18, 33), ("b", 1, 1)], "0.07 s and 0.13 s in replays of 4 ms; at least one"
    assert samples[0][0] == Sample(0.4, 1500.0)


@pytest.mark.parametrize(
    ("ms", "launches", "wanted"), [(0.8, 2, 10), (8.0, 1, 1), (0.0, 2, timing.MAX_LAUNCHES), (400.0, 2, 1), (4.0, 7, 7)]
)
def test_launches_in_a_graph(ms, launches, wanted):
    assert timing.launches_for(ms, launches) == wanted


class FakeCudaTorch:
    """torch.cuda, as far as graphs and events go: time passes by what is launched."""

    def __init__(self):
        self.now, self.captured, self.capturing, self.calls = 0.0, [], False, []
        self.cuda = types.SimpleNamespace(
            Stream=object,
            stream=lambda s: contextmanager(lambda: iter([None]))(),
            synchronize=lambda: None,
            CUDAGraph=lambda: types.SimpleNamespace(launches=0, replay=None),
            graph=self.graph,
            Event=lambda enable_timing: types.SimpleNamespace(record=lambda: None),
        )

    @contextmanager
    def graph(self, graph, stream):
        self.capturing, self.captured = True, []
        yield
        self.capturing = False
        inside = list(self.captured)

        def replay():
            self.now += 0.02 + sum(inside)  # a graph's own launch costs 20 µs

        graph.replay = replay

    def launch(self, ms):
        if self.capturing:
            self.captured.append(ms)
        else:
            self.now += ms
        self.calls.append(self.capturing)


class TimeOf(FakeClock):
    """A clock of FakeCudaTorch."""

    def __init__(self, torch):
        super().__init__()
        self.torch = torch

    def measure(self, task, *, warm_replays, replays):
        before = self.torch.now
        for _ in range(replays):
            task.replay()
        return Sample((self.torch.now - before) / replays / task.launches)


@pytest.mark.parametrize("ms", [0.002, 0.01, 0.1, 1.0, 3.9, 50.0])
def test_a_graph_takes_about_four_milliseconds(ms):
    torch = FakeCudaTorch()
    task = GraphTask(torch, "f", lambda: torch.launch(ms), TimeOf(torch))
    length = task.launches * ms
    assert 2.5 <= length <= 6.5 or task.launches == 1 and ms > 4
    assert task.launches == len(torch.captured), "the graph is the one that `launches` speaks of"
    first_capture = torch.calls.index(True)
    assert torch.calls[first_capture - 1] is False, "a warm-up call on the capturing stream comes first"


def test_a_graph_is_gone_before_its_memory_is_released():
    torch, held = FakeCudaTorch(), []

    def call():
        torch.launch(0.01)
        held.append("launch")

    task = GraphTask(torch, "f", call, TimeOf(torch), lambda: held.clear())
    assert 0 < len(held) <= task.launches + 1, "a graph that is captured anew holds nothing of the one before"
    task.close()
    assert held == [] and task._graph is None


def test_a_case_frees_what_its_functions_hold():
    log = []
    lab = object.__new__(bench_lab.Lab)
    cuda = types.SimpleNamespace(synchronize=lambda: log.append("wait"), empty_cache=lambda: log.append("empty cache"))
    lab._spec, lab._torch, lab._case = types.SimpleNamespace(cases=[None]), types.SimpleNamespace(cuda=cuda), None
    lab._open = []
    for _ in range(2):
        with lab.case(0):
            lab._open += [lambda: log.append("close 1"), lambda: log.append("close 2")]
        assert log == ["wait", "close 2", "close 1", "empty cache"] and lab._open == []
        log.clear()


def test_torch_clock_wakes_the_gpu_then_times_the_graph():
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("record")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, end):
            return 8.0

    torch = types.SimpleNamespace(cuda=types.SimpleNamespace(Event=Event))
    task = types.SimpleNamespace(name="f", launches=4, once=lambda: log.append("once"), replay=lambda: log.append("replay"))
    clock = TorchClock(torch, lambda: log.append("clock") or 1700.0, lambda name: log.append(name))
    assert clock.measure(task, warm_replays=0, replays=1) == Sample(2.0, 1700.0)
    assert log == ["f", "once", "record", "replay", "record", "wait", "clock"]
    log.clear()
    assert clock.measure(task, warm_replays=2, replays=2) == Sample(1.0, 1700.0)
    assert log == ["f", "replay", "replay", "record", "replay", "replay", "record", "clock", "wait"], "the clock is read under load"


# sensors ------------------------------------------------------------------------------------------------------------------


def fake_nvml(**changes):
    class NVMLError(Exception):
        pass

    def refuse(*_):
        raise NVMLError("Not Supported")

    functions = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetClockInfo": lambda h, kind: {1: 1755, 2: 3201}[kind],
        "nvmlDeviceGetPowerUsage": lambda h: 612345,
        "nvmlDeviceGetTemperature": lambda h, kind: 41,
        "nvmlSystemGetDriverVersion": lambda: b"580.1",
        "nvmlDeviceGetEnforcedPowerLimit": refuse,
        "nvmlDeviceGetMaxClockInfo": lambda h, kind: 1980,
    }
    names = {"NVMLError": NVMLError, "NVML_CLOCK_SM": 1, "NVML_CLOCK_MEM": 2, "NVML_TEMPERATURE_GPU": 0}
    return types.SimpleNamespace(**{**functions, **names, **{n: refuse if f is None else f for n, f in changes.items()}})


def test_sensors_through_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    sensors = timing.open_sensors("GPU-1")
    assert (sensors.source, sensors.driver, sensors.power_limit_watts, sensors.max_sm_mhz) == ("NVML", "580.1", None, 1980.0)
    assert sensors.read() == Reading(1755.0, 3201.0, 612.345, 41.0)
    assert sensors.sm_mhz() == 1755.0


def fake_smi(tmp_path, monkeypatch, line, status=0):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{line}'\nexit {status}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


def test_sensors_through_nvidia_smi(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    fake_smi(tmp_path, monkeypatch, "1980, 3201, [N/A], 33, 700.00, 1980, 580.2")
    sensors = timing.open_sensors("GPU-1")
    assert (sensors.source, sensors.driver, sensors.power_limit_watts) == ("nvidia-smi", "580.2", 700.0)
    assert sensors.read() == Reading(1980.0, 3201.0, None, 33.0)
    assert sensors.sm_mhz() is None, "too slow to say what the clock is now"


def test_sensors_that_are_not_there_say_why(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(nvmlInit=None))
    fake_smi(tmp_path, monkeypatch, "", status=9)
    sensors = timing.open_sensors("GPU-1")
    assert sensors.source.startswith("none (NVML: Not Supported; nvidia-smi: ")
    assert sensors.read() == Reading() and sensors.sm_mhz() is None


# counts and grids ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=80, deadline=None)
def test_visible_pairs_are_counted_exactly(sq, sk):
    p = Problem(3, sq, sk, 4, 2)
    assert bench.visible_pairs(HD128, p) == sq * sk
    assert bench.visible_pairs(CAUSAL, p) == sum(j <= i + sk - sq for i in range(sq) for j in range(sk))


def test_flops_of_the_papers():
    p = Problem(1, 16384, 16384, 16, 16)
    assert bench.flops(HD128, p) == 4 * 16384**2 * 128 * 16
    assert bench.flops(CAUSAL, p) == 2 * 16384**2 * 128 * 16
    exact = bench.flops(CAUSAL, p, bench.visible_pairs(CAUSAL, p))
    assert exact == 4 * 128 * 16 * (16384 * 16385 // 2)
    assert bench.flops(Attention(head_dim=192, head_dim_v=128), Problem(2, 10, 20, 4, 2)) == 2 * (192 + 128) * 10 * 20 * 4 * 2
    with pytest.raises(InputError, match="not of 'window'"):
        bench.visible_pairs(Attention(head_dim=64, mask="window", window=(3, 3)), p)


def test_compulsory_bytes():
    p = Problem(2, 10, 20, 4, 2)
    assert bench.compulsory_bytes(HD128, p) == 2 * (10 * 4 * 128 * 2 + 2 * (20 * 2 * 128 * 2) + 10 * 4 * (128 * 2 + 4))
    e4m3 = Attention(head_dim=128, dtype="e4m3")
    assert bench.compulsory_bytes(e4m3, p) == 2 * (10 * 4 * 128 + 2 * (20 * 2 * 128) + 10 * 4 * (128 * 2 + 4))


def test_grids():
    paper = bench.grid_problems("paper", 64)
    assert [(p.batch, p.sq) for p in paper] == [(32, 512), (16, 1024), (8, 2048), (4, 4096), (2, 8192), (1, 16384)]
    assert {(p.hq, p.hkv) for p in paper} == {(32, 32)} and all(p.sq == p.sk for p in paper)
    ladder = bench.grid_problems("ladder", 64)
    assert [(p.batch, p.sq) for p in ladder] == [(16, 1024), (16, 2048), (16, 4096), (4, 4096), (1, 16384)]
    assert {(p.hq, p.hkv) for p in ladder} == {(16, 16)} and all(p.sq == p.sk for p in ladder)
    assert bench.one_problem(128) == Problem(1, 16384, 16384, 16, 16)
    with pytest.raises(InputError, match=r"decode needs KV splits.*grids: paper, ladder"):
        bench.grid_problems("decode", 128)
    with pytest.raises(InputError, match="no grid 'papr'; grids: paper, ladder"):
        bench.grid_problems("papr", 128)


# a case -------------------------------------------------------------------------------------------------------------------

PROBLEM = Problem(1, 1024, 1024, 16, 16)
CEILINGS = Ceilings(Interval(800.0, 790.0, 805.0, 0.97), Interval(4.0, 3.9, 4.1, 0.97), None, None, {"memcpy": 2.7, "add": 4.0})
TIMES = {"hbm": 4.0, "tensor": 11.0, "exp": 6.0, "parallelism": 12.0, "latency": 4.0}
PREDICTION = Prediction(TIMES, "tensor", 12.0, 10, 20, "The tensor cores bind.")
LOADED = replace(CEILINGS, gemm_tflops_sustained=Interval(700, 690, 705, 0.97), copy_tbs_sustained=Interval(4, 4, 4, 0.97))


def row(name: str, kind: str = "schedule", outcome: str = "timed", reason: str = "") -> Row:
    ids = (None, "s1", "a1-s1", "NVRTC 13") if kind == "schedule" else (name, None, None, None)
    model = PREDICTION if kind == "schedule" and outcome == "timed" else None
    return Row(name, kind, *ids, outcome, reason, 0.5 if outcome == "timed" else None, None, None, model)


def a_spec(rounds: int = 6, sustained: bool = False) -> BenchSpec:
    case = CaseSpec(CAUSAL, PROBLEM, (KernelRef("fa3", "/kernels", "fa3.hd128-bf16-causal"),))
    return BenchSpec((case,), ("cudnn", "fa2", "fa3"), rounds, sustained, 7)


def a_case(spec: BenchSpec, clock=None, ours: float = 0.02, theirs: float = 0.016, ceilings: Ceilings = CEILINGS) -> CaseResult:
    candidates = [
        bench.Candidate(row("fa3"), FakeTask("fa3", ours)),
        bench.Candidate(row("wrong", outcome="wrong", reason="out[0] is 1 where the reference has 2"), None),
        bench.Candidate(row("cudnn", "peer"), FakeTask("cudnn", theirs)),
        bench.Candidate(row("fa2", "peer"), FakeTask("fa2", 0.04)),
        bench.Candidate(row("fa3 wheel", "peer", "absent", "not installed"), None),
    ]
    return bench.measure_case(spec.cases[0], candidates, clock or FakeClock(), ceilings, spec, lambda: Reading(1980.0))


def test_a_case_has_a_row_for_every_function():
    found = a_case(a_spec())
    assert [r.function for r in found.rows] == ["fa3", "wrong", "cudnn", "fa2", "fa3 wheel"]
    fa3, wrong, cudnn, _, absent = found.rows
    assert wrong.burst is None and wrong.bad and absent.burst is None and not absent.bad
    flops = 2 * 1024**2 * 128 * 16
    assert found.flops == flops and found.flops_visible == 4 * 128 * 16 * (1024 * 1025 // 2)
    t = fa3.burst
    assert t.ms.median == 0.02 and t.tflops.median == pytest.approx(flops / 0.02e-3 / 1e12)
    assert t.tflops_visible == pytest.approx(t.tflops.median * 1025 / 1024)
    assert t.gemm_share == pytest.approx(t.tflops.median / 800)
    assert t.copy_share == pytest.approx(found.bytes / 0.02e-3 / 1e12 / 4.0)
    assert t.sm_mhz == 1900.0 and t.launches == 10 and t.samples_ms == (0.02,) * 6
    assert t.ratio.median == pytest.approx(0.8) and t.best_peer == "cudnn"
    assert cudnn.burst.ratio is None and cudnn.burst.best_peer is None
    assert fa3.sustained is None
    assert a_case(a_spec(), ours=0.015).rows[0].burst.ratio.median > 1


def test_the_ratio_pairs_rounds():
    """A GPU that slows down from round to round spreads the times, not the ratio."""
    t = a_case(a_spec(rounds=10), FakeClock(drift=0.05)).rows[0].burst
    assert t.ms.high / t.ms.low > 1.5
    assert t.ratio.low > 0.7 and t.ratio.high < 0.9 and t.ratio.median == pytest.approx(0.8, rel=0.05)


def test_sustained_is_measured_after_burst_against_its_own_ceilings():
    clock = FakeClock()
    found = a_case(a_spec(rounds=8, sustained=True), clock, ceilings=LOADED)
    t = found.rows[0].sustained
    assert len(t.samples_ms) == timing.SUSTAINED_ROUNDS and t.sm_mhz == 1500.0
    assert t.gemm_share == pytest.approx(t.tflops.median / 700)
    assert [entry[1] > 0 for entry in clock.log] == [False] * 24 + [True] * 18


def test_no_peer_no_ratio():
    spec = a_spec()
    candidates = [bench.Candidate(row("fa3"), FakeTask("fa3", 1.0))]
    found = bench.measure_case(spec.cases[0], candidates, FakeClock(), CEILINGS, spec, Reading)
    assert found.rows[0].burst.ratio is None


def test_ceilings():
    copies = [FakeTask("memcpy", 0.8), FakeTask("add", 0.5)]
    found = bench.measure_ceilings(FakeTask("gemm", 1.5), copies, FakeClock(), a_spec(sustained=True))
    assert found.gemm_tflops.median == pytest.approx(2 * 8192**3 / 1.5e-3 / 1e12)
    assert found.copy_tbs.median == found.copy_tbs_sustained.median == pytest.approx(2 * 2**30 / 0.5e-3 / 1e12)
    assert found.copies_tbs == {"memcpy": pytest.approx(2 * 2**30 / 0.8e-3 / 1e12), "add": found.copy_tbs.median}
    assert bench.measure_ceilings(FakeTask("gemm", 1), copies, FakeClock(), a_spec()).gemm_tflops_sustained is None


# results ------------------------------------------------------------------------------------------------------------------


def a_result(**changes) -> BenchResult:
    spec = a_spec(sustained=True)
    machine = Machine("NVIDIA H200", "9.0", 132, 1 << 37, "580.1", 700.0, None, "NVML")
    about = (bench.SCHEMA, "2026-01-02T03:04:05+00:00", 1.5, machine, {"torch": "2.11"}, bench.METHOD)
    return replace(BenchResult(*about, 6, 7, LOADED, (a_case(spec, ceilings=LOADED),)), **changes)


def test_json_round_trip_is_exact():
    spec, result = a_spec(), a_result()
    assert BenchSpec.from_json(spec.to_json()) == spec
    assert BenchResult.from_json(result.to_json()) == result
    assert not result.ok, "one schedule is wrong"
    assert BenchResult.from_dict(json.loads(json.dumps(result.to_dict()))).cases[0].attention == CAUSAL


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("rounds"), r"BenchResult: lacks 'rounds'"),
        (lambda d: d.update(extra=1), r"BenchResult: has the unknown member 'extra'"),
        (lambda d: d["machine"].update(sms="132"), r"BenchResult.machine.sms: is a str where a int belongs"),
        (lambda d: d["cases"][0]["rows"][0].update(function=None), r"BenchResult.cases\[0\].rows\[0\].function: is a NoneType"),
    ],
)
def test_json_that_does_not_fit_names_the_member(change, message):
    data = a_result().to_dict()
    change(data)
    with pytest.raises(InputError, match=message):
        BenchResult.from_dict(data)


def test_results_of_an_older_version_lack_what_has_a_default():
    result = a_result()
    data = result.to_dict()
    del data["inputs"], data["cases"][0]["rows"][0]["about"]
    assert BenchResult.from_dict(data) == result


def with_ratio(case: CaseResult, ratio: float, **changes) -> CaseResult:
    """The case with another ratio of its first row, in a burst and, twice as good, under load."""

    def timed(t, factor):
        return replace(t, ratio=Interval(factor * ratio, 0.0, 9.0, 0.97), gemm_share=0.5)

    first, *rest = case.rows
    first = replace(first, burst=timed(first.burst, 1), sustained=timed(first.sustained, 2))
    return replace(case, rows=(first, *rest), **changes)


def test_summary_of_many_cases():
    (case,) = a_result().cases
    hd64 = replace(CAUSAL, head_dim=64)
    parts = [
        with_ratio(case, 2.0),
        with_ratio(case, 0.5, problem=Problem(2, 512, 512, 16, 16)),
        with_ratio(case, 4.0, attention=hd64),
        with_ratio(case, 2.0, attention=hd64, problem=Problem(2, 512, 512, 16, 16)),
    ]
    found = summaries(a_result(cases=tuple(parts)))
    assert [(s.function, s.load, s.group) for s in found] == [
        ("fa3", load, group) for load in ("burst", "sustained") for group in ("hd128 bf16 causal", "hd64 bf16 causal", "all bf16")
    ]
    hd128, hd64_, whole, *_, loaded = found
    assert (hd128.cases, hd128.below, hd128.least, hd128.where) == (2, 1, 0.5, "2,16,16,512,512")
    assert hd128.mean == pytest.approx(1.0) and hd64_.mean == pytest.approx(8**0.5)
    assert (whole.cases, whole.least, whole.where) == (4, 0.5, "hd128 bf16 causal 2,16,16,512,512")
    assert whole.mean == pytest.approx(8**0.25) and loaded.mean == pytest.approx(2 * 8**0.25)
    assert whole.gemm_share == pytest.approx(0.5)
    assert summaries(a_result()) == (), "one case says it all itself"


def test_json_that_is_none():
    with pytest.raises(InputError, match="BenchSpec: is not JSON"):
        BenchSpec.from_json("{")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 0}, "--rounds: 0; at least 1"),
        ({"peers": ("fa4",)}, "--vs: no peer 'fa4'; peers: cudnn, fa2, fa3, flex, triton, none"),
        ({"cases": ()}, "--shape: nothing to measure"),
        ({"cases": (CaseSpec(HD128, Problem(1, 0, 5, 2, 2), ()),)}, "every size must be at least 1"),
        ({"cases": (CaseSpec(HD128, Problem(1, 5, 5, 6, 4), ()),)}, r"6 query heads are not a multiple of 4.*\[1, 2, 3, 6\]"),
    ],
)
def test_a_spec_that_cannot_be_measured(changes, message):
    with pytest.raises(InputError, match=message):
        bench.run_bench(replace(a_spec(), **changes))


# peers --------------------------------------------------------------------------------------------------------------------


class Tensorish:
    """Shape and layout of a tensor, nothing else."""

    def __init__(self, *shape, contiguous=True):
        self.shape, self.is_contiguous = shape, contiguous

    def transpose(self, a, b):
        shape = list(self.shape)
        shape[a], shape[b] = shape[b], shape[a]
        return Tensorish(*shape, contiguous=not self.is_contiguous)

    def contiguous(self):
        return Tensorish(*self.shape)


@pytest.fixture
def torch(monkeypatch):
    """A torch whose scaled_dot_product_attention records its calls. `torch.refusal`: what it raises instead."""
    module = types.SimpleNamespace(__version__="2.11.0", calls=[], refusal=None, active=[])
    module.cuda = types.SimpleNamespace(synchronize=lambda: None, OutOfMemoryError=MemoryError)

    def sdpa(q, k, v, **options):
        if module.refusal is not None:
            raise module.refusal
        module.calls.append((module.active[-1], q.shape, q.is_contiguous, options))
        return q

    @contextmanager
    def sdpa_kernel(backend):
        module.active.append(backend)
        yield
        module.active.pop()

    module.nn = types.SimpleNamespace(functional=types.SimpleNamespace(scaled_dot_product_attention=sdpa))
    backends = types.SimpleNamespace(CUDNN_ATTENTION="cudnn", FLASH_ATTENTION="flash")
    monkeypatch.setitem(sys.modules, "torch", module)
    monkeypatch.setitem(sys.modules, "torch.nn", module.nn)
    monkeypatch.setitem(sys.modules, "torch.nn.attention", types.SimpleNamespace(SDPBackend=backends, sdpa_kernel=sdpa_kernel))
    monkeypatch.setitem(sys.modules, peers.FA3_MODULE, None)
    monkeypatch.setitem(sys.modules, peers.FLA_MODULE, None)
    return module


def qkv(sq=100, sk=100, hq=4, hkv=4):
    return Tensorish(2, sq, hq, 128), Tensorish(2, sk, hkv, 128), Tensorish(2, sk, hkv, 128)


def test_sdpa_peers_get_their_layout_and_backend(torch):
    attention = Attention(head_dim=128, mask="causal", scale=0.5)
    _, out = peers.prepare("cudnn", torch, attention, *qkv())
    assert out.shape == (2, 100, 4, 128)
    peers.prepare("fa2", torch, attention, *qkv(hkv=2))
    options = {"is_causal": True, "scale": 0.5}
    assert torch.calls == [
        ("cudnn", (2, 4, 100, 128), True, options),
        ("flash", (2, 4, 100, 128), False, {**options, "enable_gqa": True}),
    ]


@pytest.mark.parametrize(
    ("name", "attention", "inputs", "reason"),
    [
        ("cudnn", Attention(head_dim=128, dtype="e4m3"), qkv(), "takes no e4m3"),
        ("fa2", CAUSAL, qkv(sk=50), "aligns a causal mask top-left"),
        ("fa2", Attention(head_dim=128, softcap=30.0), qkv(), "compared without softcap only"),
        ("fa3", HD128, qkv(), r"fa3_fwd_interface \(wheel fa3-fwd\) cannot be imported"),
        ("flex", Attention(head_dim=128, dtype="e4m3"), qkv(), "FlexAttention takes no e4m3"),
        ("triton", HD128, qkv(), "fla-core's attention is causal, with equal lengths, only"),
        ("triton", CAUSAL, qkv(sk=50), "is causal, with equal lengths, only"),
        ("triton", CAUSAL, qkv(), r"fla.ops.attn \(package fla-core\) cannot be imported"),
    ],
)
def test_an_absent_peer_says_why(torch, name, attention, inputs, reason):
    with pytest.raises(peers.PeerAbsent, match=reason):
        peers.prepare(name, torch, attention, *inputs)
    assert torch.calls == []


def test_a_refusal_is_told_in_one_line(torch):
    torch.refusal = RuntimeError("this build does not do that\nException raised from somewhere\nmore")
    with pytest.raises(peers.PeerAbsent, match=r"^this build does not do that$"):
        peers.prepare("cudnn", torch, HD128, *qkv())
    torch.refusal = MemoryError()
    with pytest.raises(peers.PeerAbsent, match=r"^out of GPU memory$"):
        peers.prepare("cudnn", torch, HD128, *qkv())


def test_reasons_that_torch_only_warns_of(torch, monkeypatch):
    import warnings

    def sdpa(*_, **__):
        warnings.warn("Head dim must be at most 256. (Triggered internally at x.cpp:1)", UserWarning, stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
    with pytest.raises(peers.PeerAbsent, match=r"^Head dim must be at most 256\.$"):
        peers.prepare("fa2", torch, HD128, *qkv())


def test_fa3_returns_its_output_alone(torch, monkeypatch):
    seen = {}

    def flash_attn_func(q, k, v, **options):
        seen.update(options)
        return q, "lse"

    monkeypatch.setitem(sys.modules, peers.FA3_MODULE, types.SimpleNamespace(flash_attn_func=flash_attn_func))
    inputs = qkv(sk=50)
    _, out = peers.prepare("fa3", torch, CAUSAL, *inputs)
    assert out is inputs[0] and seen == {"softmax_scale": 128**-0.5, "causal": True}


def test_flex_is_compiled_anew_for_each_case_and_masks_bottom_right(torch, monkeypatch):
    seen = []

    def flex_attention(q, k, v, **options):
        seen.append((q.shape, q.is_contiguous, options))
        return q

    def create_block_mask(mask, b, h, rows, keys, device):
        return [(rows, keys), mask(0, 0, 0, keys - rows), mask(0, 0, 0, keys - rows + 1)]

    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: object())
    flex = types.SimpleNamespace(flex_attention=flex_attention, create_block_mask=create_block_mask)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.flex_attention", flex)
    resets = []
    torch.compiler = types.SimpleNamespace(reset=lambda: resets.append(1))
    torch.compile = lambda function, dynamic: function
    inputs = qkv(sq=50, hkv=2)
    for x in inputs:
        x.device = "cuda"
    monkeypatch.setattr(Tensorish, "device", "cuda", raising=False)
    _, out = peers.prepare("flex", torch, Attention(head_dim=128, mask="causal", scale=0.5), *inputs)
    assert out.shape == (2, 50, 4, 128) and resets == [1]
    masked = [(50, 100), True, False]
    assert seen == [((2, 4, 50, 128), True, {"scale": 0.5, "enable_gqa": True, "block_mask": masked})]
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(peers.PeerAbsent, match="compiled by triton, which is not installed"):
        peers.prepare("flex", torch, CAUSAL, *inputs)


def test_triton_attention_through_fla(torch, monkeypatch):
    seen = {}

    def parallel_attn(q, k, v, **options):
        seen.update(options)
        return q

    monkeypatch.setitem(sys.modules, peers.FLA_MODULE, types.SimpleNamespace(parallel_attn=parallel_attn))
    inputs = qkv()
    _, out = peers.prepare("triton", torch, CAUSAL, *inputs)
    assert out is inputs[0] and seen == {"scale": 128**-0.5}


@pytest.mark.parametrize(("number", "text"), [(91900, "cuDNN 9.19.0"), (8902, "cuDNN 8.9.2"), (None, None)])
def test_cudnn_version(number, text):
    cudnn = types.SimpleNamespace(is_available=lambda: number is not None, version=lambda: number)
    module = types.SimpleNamespace(__version__="2.11", backends=types.SimpleNamespace(cudnn=cudnn))
    found = peers.versions(module, ("cudnn",))
    assert found == ({} if text is None else {"cudnn": f"{text} in torch 2.11"})


# verification -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("dtype", ["bf16", "e4m3", "int8", "int8_qk"])
def test_verification_on_the_cpu_of_torch(dtype, mask):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from fagen.explore import verify
    from fagen.oracle import baseline, reference

    attention, p = Attention(head_dim=64, mask=mask, **tuned.types_of(dtype)), Problem(1, 300, 200, 40, 8)
    generator = torch.Generator().manual_seed(1)
    kind = torch.bfloat16 if attention.value_dtype == "bf16" else torch.float8_e4m3fn
    shapes = ((1, 300, 40, 64), (1, 200, 8, 64), (1, 200, 8, 64))
    q, k, v = (torch.randn(s, generator=generator) for s in shapes)
    v = v.to(kind)
    integers = attention.dtype == "int8"  # what they stand for
    q, k = (((x * 32).round().clamp(-127, 127) / 32 if integers else x.to(kind)) for x in (q, k))
    want = verify.expected(torch, attention, p, q, k, v, 0)
    arrays = [x.float().numpy() for x in (q, k, v)]
    exact, _ = reference(attention, *arrays)
    at = (want.batches[:, None], want.rows[None, :], want.heads[:, None])
    assert abs(exact[at] - want.reference[0][:, :, 0]).max() < 1e-12
    rounded, lse = baseline(attention, *arrays)
    out, lse = torch.tensor(rounded.astype("float32")).bfloat16(), torch.tensor(lse)
    assert verify.judge(torch, want, out, lse).passed and verify.judge(torch, want, out, None).passed
    off = out.clone()
    off[0, -1, 0, 3] += 0.5
    assert not verify.judge(torch, want, off, lse).passed
    unwritten = out.clone()
    unwritten[0, 150, 20, 1] = float("nan")
    assert "1 NaN" in verify.judge(torch, want, unwritten, lse).reason, "wherever it is"


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("changes", [{"dtype": "int8"}, {"dtype": "fp16", "precision": "int8", "hadamard": True}], ids=str)
def test_verification_has_the_baselines_of_fagen_check(changes, mask):
    """Both of a stale reference: bit for bit where the tensor core's sums of scores are exact."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from fagen.explore import verify
    from fagen.oracle import make_inputs
    from fagen.oracle.yardstick import yardstick

    attention, schedule = fagen.load("fa3_fp8", head_dim=64, mask=mask, **changes)
    p = Problem(1, 60, 300, 4, 2)
    arrays = make_inputs(attention, p, seed=5)
    kinds = {"int8": torch.int8, "fp16": torch.float16, "e4m3": torch.float32}
    q, k, v = (
        torch.tensor(x.astype("float32")).to(kinds[t]) for x, t in zip(arrays, (attention.dtype,) * 2 + (attention.value_dtype,))
    )
    got = verify.expected(torch, attention, p, q, k, v, 0, schedule)
    want = yardstick(attention, *arrays, got.rows, schedule)
    (exact,), (nearly,) = (
        want.reference[0].transpose(0, 2, 1, 3)[:, :, :, None],
        want.baseline[0].transpose(0, 2, 1, 3)[:, :, :, None],
    )
    assert abs(got.reference[0] - exact).max() < 1e-12
    assert (got.baseline[0] == nearly.astype("float32")).mean() > 0.99
    (steps,) = want.weight_step.transpose(0, 2, 1, 3)[:, :, :, None]
    assert steps.max() > 0.001 and abs(got.weight_step - steps).max() < 1e-6
    alone = verify.expected(torch, attention, p, q, k, v, 0, schedule.replace(reference="running", overlap="within"))
    assert (got.baseline[0] == alone.baseline[0]).mean() < 0.9 and not np.any(alone.weight_step)


# the watched process ------------------------------------------------------------------------------------------------------


def test_the_worker_reports_that_there_is_no_gpu():
    try:
        driver.device_count()
    except LaunchError:
        pass
    else:
        pytest.skip("there is a GPU")
    with pytest.raises(LaunchError, match=r"^no GPU: "):
        bench_watch.run_watched(a_spec())


class FakeWatched:
    """A worker that says what it was told to."""

    said: tuple = ()

    def __init__(self, task, request):
        assert task == bench_watch.TASK
        FakeWatched.spec = BenchSpec.from_dict(request["spec"])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def messages(self):
        for message in self.said:
            if isinstance(message, Exception):
                raise message
            yield message


@pytest.fixture
def watched(monkeypatch):
    monkeypatch.setattr(bench_watch.guard, "Watched", FakeWatched)
    return lambda *said: monkeypatch.setattr(FakeWatched, "said", said)


def test_results_come_back_whole(watched):
    result = a_result()
    case = result.cases[0]
    watched(
        {"kind": "at", "case": None, "function": None},
        {"kind": "at", "case": 0, "function": "fa3"},
        {"kind": "case", "result": case.to_dict()},
        {"kind": "result", "result": result.to_dict()},
    )
    cases, functions = [], []
    assert bench_watch.run_watched(a_spec(), cases.append, lambda *at: functions.append(at)) == result
    assert cases == [case] and functions == [(0, "fa3")] and FakeWatched.spec == a_spec()


@pytest.fixture(scope="module")
def kernel_folder(tmp_path_factory):
    """fa3 at head_dim 64, full and causal, as `fagen build` would write them."""
    folder = tmp_path_factory.mktemp("kernels")
    for mask in ("full", "causal"):
        (item,) = common.select(["fa3"], ["head_dim=64", f"mask={mask}"])
        write_built(common.built(item), folder, common.built_name(item))
    return folder


def test_a_kernel_that_hangs_leaves_a_bundle(watched, kernel_folder, tmp_path):
    (item,) = common.select(["fa3"], ["head_dim=64", "mask=causal"])
    case = CaseSpec(item.attention, PROBLEM, (KernelRef("fa3", str(kernel_folder), item.name),))
    spec = replace(a_spec(), cases=(case,))
    hang = bench_watch.guard.GuardError("hang", "fa3 is timed", "no sign of life for 20 s", "a log")
    watched({"kind": "at", "case": 0, "function": "fa3"}, hang)
    with pytest.raises(LaunchError, match="fa3 is timed: no sign of life for 20 s\nrepro bundle: ") as failure:
        bench_watch.run_watched(spec, bundles=tmp_path)
    (bundle,) = tmp_path.iterdir()
    assert str(bundle) in str(failure.value)
    facts = bench_watch.guard.read_bundle(bundle)
    assert facts["case"]["problem"]["sq"] == 1024 and facts["case"]["seed"] == 7 and facts["failure"] == "hang"
    watched({"kind": "at", "case": 0, "function": peers.PEERS["fa3"].title}, hang)
    with pytest.raises(LaunchError, match=r"no sign of life for 20 s: a log$"):
        bench_watch.run_watched(spec, bundles=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1, "no bundle for what is not ours"


class HalfArray:
    """A tensor of float32 values that stand for those of a 16-bit type, with as much of torch as inputs are made with."""

    device = "cpu"

    def __init__(self, x, dtype):
        self.x, self.dtype = x, dtype

    @classmethod
    def make(cls, shape, dtype, seed):
        return cls(cast(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype).astype(np.float32), dtype)

    def to(self, dtype):
        return HalfArray(self.x if dtype == "fp32" else cast(self.x, dtype).astype(np.float32), dtype)

    def float(self):
        return self.to("fp32")

    def __setitem__(self, at, value):
        self.x[at] = value.x if isinstance(value, HalfArray) else value

    def __getitem__(self, at):
        return HalfArray(self.x[at], self.dtype)

    def __sub__(self, other):
        return HalfArray(self.x - getattr(other, "x", other), self.dtype)

    def __rsub__(self, other):
        return HalfArray(other - self.x, self.dtype)

    def __truediv__(self, divisor):
        return HalfArray((self.x / divisor).astype(np.float32), self.dtype)

    def round(self):
        return HalfArray(np.rint(self.x), self.dtype)

    def clamp(self, low, high):
        return HalfArray(np.clip(self.x, low, high), self.dtype)

    def __mul__(self, factor):
        return HalfArray((self.x * factor).astype(np.float32), self.dtype)

    def __lt__(self, other):
        return HalfArray(self.x < other, "bool")


NumpyTorch = types.SimpleNamespace(float32="fp32", arange=lambda n, device, dtype: HalfArray(np.arange(n, dtype=np.float32), dtype))


# the command --------------------------------------------------------------------------------------------------------------


def run(*arguments):
    return cli_bench.command.main(list(arguments), prog_name="fagen bench", standalone_mode=False)


@pytest.fixture
def lab(monkeypatch):
    """Pretends that there is a GPU: `lab.specs` collects what would be measured, `lab.result` is what comes out."""
    pretended = types.SimpleNamespace(specs=[], result=a_result())

    def run_watched(spec, on_case, on_function):
        pretended.specs.append(spec)
        on_function(0, "fa3")
        on_case(pretended.result.cases[0])
        return pretended.result

    monkeypatch.setattr(bench_watch, "run_watched", run_watched)
    monkeypatch.setattr(bench_lab, "check_device", lambda: None)
    return pretended


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fa3", "--vs", "fa4"], "--vs: no peer 'fa4'"),
        (["fa3", "--grid", "decode"], "decode needs KV splits"),
        (["fa3", "--shape", "1,2,3"], "--shape: '1,2,3' is not B,HQ,HKV,SQ,SK"),
        (["fa3", "--inputs", "sinks"], "--inputs: no inputs 'sinks'; there are normal, sink, growing"),
        (["fa3_fp8", "--inputs", "growing"], "--inputs: growing scores need more range than e4m3 has"),
        (["fa33"], "did you mean fa3"),
        (["fa3", "--set", "mask=full", "--causal"], "--causal: given beside --set mask"),
        (["fa3", "--output", "/nowhere/at/all.json"], "--output: there is no folder /nowhere/at"),
        (["fa3", "--output", "/"], "--output: / is a folder"),
        (["fa3", "--plot", "/nowhere/at/all.svg"], "--plot: there is no folder /nowhere/at"),
        (["fa3", "--plot", "ladder.jpeg"], r"--plot: ladder\.jpeg has none of the suffixes \.svg, \.png, \.pdf"),
        (["fa3", "--json", "--markdown"], "--markdown: given beside --json"),
        (["fa3", "--from-results", "x.json"], "--from-results measures nothing; leave the schedules out"),
        (["--from-results", "x.json", "--vs", "none"], "--vs: given beside --from-results, which measures nothing"),
        (["--from-results", "x.json", "--seed", "0"], "--seed: given beside --from-results"),
        (["fa3", "--parts"], "--parts: none of the schedules quantises"),
        ([], "SCHEDULE: name schedules to time"),
        (["--from-results", "/nowhere.json"], r"--from-results: /nowhere\.json cannot be read"),
    ],
)
def test_mistakes_are_told_before_anything_is_built(arguments, message, monkeypatch):
    monkeypatch.setattr(cli_bench, "built", lambda *_, **__: pytest.fail("built"))
    with pytest.raises(InputError, match=message) as e:
        run(*arguments)
    assert e.value.exit_code == 2 and "\n" not in str(e.value)


def test_no_gpu_is_one_line_before_anything_is_built(monkeypatch):
    def no_gpu():
        raise LaunchError("no GPU: the CUDA driver sees no device")

    monkeypatch.setattr(driver, "device_count", no_gpu)
    monkeypatch.setattr(cli_bench, "built", lambda *_, **__: pytest.fail("built"))
    with pytest.raises(LaunchError, match=r"^no GPU: the CUDA driver sees no device$") as e:
        run("fa3")
    assert e.value.exit_code == 1


def test_no_torch_is_one_line(monkeypatch):
    monkeypatch.setattr(driver, "device_count", lambda: 1)
    monkeypatch.setattr(bench_lab.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LaunchError, match="torch, which is not installed; pip install") as e:
        run("fa3")
    assert "\n" not in str(e.value)


def kernels(*schedules, settings=(), causal=None, grid=None, shapes=(), ablate=False):
    return needed.needed(schedules, settings, causal, grid, shapes, ablate)


def test_the_paper_grid_takes_what_the_options_leave_open():
    everything = kernels("fa3", "fa2", grid="paper")
    assert len(everything) == 12 and all(len(n.problems) == 6 for n in everything)
    wanted = {(d, m) for d in (64, 128, 256) for m in ("full", "causal")}
    assert {(n.item.attention.head_dim, n.item.attention.mask) for n in everything} == wanted
    narrowed = kernels("fa3", settings=["head_dim=64", "dtype=fp16"], causal=True, grid="paper")
    assert [(n.item.attention.label, n.label) for n in narrowed] == [("hd64 fp16 causal", "fa3")]
    assert [n.item.attention.mask for n in kernels("fa3", settings=["mask=causal"], grid="ladder")] == ["causal"]
    assert [n.item.attention.mask for n in kernels("fa3", grid="ladder")] == ["full", "causal"]
    assert [n.item.attention.mask for n in kernels("fa3")] == [fagen.load("fa3").attention.mask]


def test_a_changed_schedule_shows_its_id():
    (kernel,) = kernels("fa3", settings=["tile_kv=128"])
    assert kernel.label == f"fa3.{kernel.item.schedule.id}"


def test_shapes_and_grids_add_up():
    assert needed.problems_of(HD128, None, []) == (bench.one_problem(128),)
    assert needed.problems_of(HD128, None, ["2,8,2,100,200", "2,8,2,100,200"]) == (Problem(2, 100, 200, 8, 2),)
    assert len(needed.problems_of(HD128, "paper", ["2,8,2,100,200"])) == 7


# the tuned table, and ablations -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_tuned_on_the_paper_grid_is_36_cases_of_one_row(dtype):
    found = kernels("tuned", settings=[f"dtype={dtype}"], grid="paper")
    specs = needed.cases(found, [("/k", n.item.name) for n in found])
    assert len(specs) == 36 and {c.attention.dtype for c in specs} == {dtype}
    by_length = [c.problem.sq for c in specs if c.attention.label == f"hd64 {dtype} causal"]
    assert by_length == [512, 1024, 2048, 4096, 8192, 16384], "in the order of the grid"
    for case, kernel in zip(specs, found):
        choice = tuned.choose(case.attention, case.problem)
        (ref,) = case.kernels
        assert kernel.item.schedule == choice.schedule and ref.label == "tuned"
        assert ref.about.endswith(choice.why) and choice.schedule.id in ref.about
    items = needed.distinct(found)
    assert len(items) < 30 and len({i.name for i in items}) == len(items), "each schedule once"
    assert {(i.attention, i.schedule) for i in items} == {(n.item.attention, n.item.schedule) for n in found}


def test_tuned_stands_among_others_in_the_order_of_the_command_line():
    specs = needed.cases(
        found := kernels("fa2", "tuned", "fa3", settings=["head_dim=64"], grid="paper"), [("/k", "f")] * len(found)
    )
    assert len(specs) == 12 and all([r.label for r in c.kernels] == ["fa2", "tuned", "fa3"] for c in specs)


def test_knobs_change_what_the_table_has():
    (kernel,) = kernels("tuned", settings=["overlap=within", "head_dim=128"])
    choice = tuned.choose(kernel.item.attention, kernel.problems[0])
    assert kernel.item.schedule == choice.schedule.replace(overlap="within")
    assert kernel.label == f"tuned.{kernel.item.schedule.id}"


def test_ablations_remove_one_thing_each():
    whole = fagen.load("fa3").schedule.replace(tile_kv=128, reference="stale", fuse_tiles=True)
    found = {a.name: a for a in ablations(HD128, whole)}
    assert list(found) == [n for n in ABLATIONS if n != "masked blocks computed"]
    skips = fagen.load("fa3").schedule.replace(tile_kv=64, skip_masked=True)
    (computed,) = [a for a in ablations(HD128.replace(mask="causal"), skips) if a.name == "masked blocks computed"]
    assert skips.diff(computed.schedule) == {"skip_masked": (True, False)}
    changed = {name: {k: new for k, (_, new) in whole.diff(a.schedule).items()} for name, a in found.items()}
    assert changed["no ping-pong"] == {"overlap": "within"}
    assert changed["no own overlap"] == {"overlap": "pingpong", "reference": "running", "fuse_tiles": False}
    assert changed["no overlap"] == {"overlap": "none", "reference": "running", "fuse_tiles": False}
    assert changed["no specialised warps"] == {"roles": "uniform", "overlap": "within", "fuse_tiles": False}
    assert changed["running maximum"] == {"reference": "running", "fuse_tiles": False}
    assert changed["tiles not fused"] == {"fuse_tiles": False}
    assert found["no ping-pong"].changed == "overlap=within"
    for a in found.values():
        tuned.check(HD128, a.schedule)


def test_ablations_of_what_a_schedule_has_not():
    within = fagen.load("fa3", head_dim=64).schedule.replace(overlap="within", reference="running")
    assert [a.name for a in ablations(Attention(head_dim=64), within)] == ["no own overlap", "no specialised warps"]
    assert ablations(HD128, fagen.load("fa2").schedule) == ()


def test_an_ablation_takes_the_blocks_that_fit():
    attention, schedule = fagen.load("fa3", head_dim=256, reference="stale")
    uniform = next(a for a in ablations(attention, schedule) if a.name == "no specialised warps")
    assert uniform.schedule.tile_kv < schedule.tile_kv and f"tile_kv={uniform.schedule.tile_kv}" in uniform.changed
    tuned.check(attention, uniform.schedule)
    with pytest.raises(fagen.ScheduleError):
        tuned.check(attention, uniform.schedule.replace(tile_kv=uniform.schedule.tile_kv + 16))


def test_ablations_are_rows_of_one_case():
    found = kernels("fa3", ablate=True)
    (case,) = needed.cases(found, [("/k", n.item.name) for n in found])
    assert [r.label for r in case.kernels] == ["fa3"] + [f"fa3, {n}" for n in list(ABLATIONS)[:4]]
    assert case.kernels[1].about == "fa3 with overlap=within" and len({r.file for r in case.kernels}) == 5
    assert all(common.planned(n.item) for n in found[1:2])


def test_build_writes_what_bench_takes(lab, tmp_path):
    options = ["tuned", "--set", "head_dim=64", "--shape", "1,2,2,100,100", "--shape", "16,32,32,1024,1024"]
    assert run_cli(["build", *options, "--causal", "-o", str(tmp_path)]) == 0
    assert run_cli(["build", "tuned", "--variants", "-o", str(tmp_path)]) == 2
    run(*options, "--causal", "--from", str(tmp_path))
    (spec,) = lab.specs
    assert len(spec.cases) == 2 and all((tmp_path / f"{r.file}.cubin").exists() for c in spec.cases for r in c.kernels)


# inputs -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attention", "problem", "block", "message"),
    [
        (Attention(head_dim=64, dtype="e4m3"), Problem(1, 64, 64, 1, 1), 64, "more range than e4m3"),
        (Attention(head_dim=64, dtype="int8"), Problem(1, 64, 64, 1, 1), 64, "more range than int8"),
        (Attention(head_dim=64, dtype="fp16"), Problem(1, 64, 1 << 20, 1, 1), 64, "1048576 keys exceed the range of fp16"),
    ],
)
def test_growing_scores_need_range(attention, problem, block, message):
    with pytest.raises(InputError, match=message):
        bench_inputs.check_inputs("growing", attention, problem, block)
    bench_inputs.check_inputs("sink", attention, problem, block)
    bench_inputs.check_inputs("growing", Attention(head_dim=64), problem, block)


@pytest.mark.parametrize("dtype, scale", [("e4m3", 2e-3), ("fp16", 1e-5)])
def test_a_sink_needs_range(dtype, scale):
    attention, problem = Attention(head_dim=64, dtype=dtype, scale=scale), Problem(1, 64, 64, 1, 1)
    with pytest.raises(InputError, match=f"--inputs: a sink with scale {scale:g} needs .* in k, beyond the range of {dtype}"):
        bench_inputs.check_inputs("sink", attention, problem)
    bench_inputs.check_inputs("sink", Attention(head_dim=64, dtype=dtype, scale=0.02), problem)
    bench_inputs.check_inputs("sink", Attention(head_dim=64, dtype="int8", scale=scale), problem)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", bench_inputs.KINDS)
def test_inputs_have_the_pattern_that_they_are_named_for(kind, dtype, monkeypatch):
    """On a torch of NumPy: `half` rounds as the type does."""
    attention, problem, block = Attention(head_dim=128, dtype=dtype), Problem(1, 8, 4096, 2, 1), 128
    monkeypatch.setattr(bench_inputs, "normal", lambda torch, shape, dtype, seed: HalfArray.make(shape, dtype, seed))
    q, k, v = bench_inputs.make_inputs(NumpyTorch, attention, problem, kind, 3, block)
    assert q.x.shape == (1, 8, 2, 128) and k.x.shape == v.x.shape == (1, 4096, 1, 128)
    scores = np.einsum("bqhd,bkd->bhqk", q.x, k.x[:, :, 0]) * attention.softmax_scale
    if kind == "normal":
        assert abs(scores.std() - 1) < 0.1
    elif kind == "sink":
        rest = scores[..., 4:]
        assert abs((scores[..., :4].mean() - rest.mean()) - 8) < 1 and abs(rest.std() - 1) < 0.1
    else:
        tops = scores.reshape(1, 2, 8, -1, block).max(axis=-1) / np.log(2)
        growth = -np.diff(tops, axis=-1)
        assert growth.min() > 20 and abs(growth.mean() - 30) < 0.5, "every block, towards key 0"


@pytest.mark.parametrize("dtype", ["fp16", "e4m3", "int8"])
def test_a_large_scale_makes_smaller_inputs(dtype, monkeypatch):
    attention, problem = Attention(head_dim=128, dtype=dtype, scale=100.0), Problem(1, 8, 1024, 2, 1)
    monkeypatch.setattr(bench_inputs, "normal", lambda torch, shape, dtype, seed: HalfArray.make(shape, dtype, seed))
    monkeypatch.setattr(NumpyTorch, "int8", "int8", raising=False)
    q, k, _ = bench_inputs.make_inputs(NumpyTorch, attention, problem, "normal", 3, 128)
    units = bench_inputs.descales(attention, "normal")
    meant = math.prod(units.values()) * attention.softmax_scale
    scores = np.einsum("bqhd,bkd->bhqk", q.x, k.x[:, :, 0]) * meant
    assert q.dtype == k.dtype == dtype and 0.9 < scores.std() < 2.1


@pytest.mark.parametrize("v_dtype, of_v", [(None, "e4m3"), ("bf16", "bf16")])
@pytest.mark.parametrize("kind", ["normal", "sink"])
def test_int8_inputs_stand_for_the_pattern(kind, v_dtype, of_v, monkeypatch):
    """Multiples of what the call gives as descales, all within ±127."""
    attention, problem = Attention(head_dim=128, dtype="int8", v_dtype=v_dtype), Problem(1, 8, 4096, 2, 1)
    monkeypatch.setattr(bench_inputs, "normal", lambda torch, shape, dtype, seed: HalfArray.make(shape, dtype, seed))
    monkeypatch.setattr(NumpyTorch, "int8", "int8", raising=False)
    q, k, v = bench_inputs.make_inputs(NumpyTorch, attention, problem, kind, 3, 128)
    assert (q.dtype, k.dtype, v.dtype) == ("int8", "int8", of_v)
    assert all(100 < abs(x.x).max() <= 127 and (x.x == np.rint(x.x)).all() for x in (q, k))
    units = bench_inputs.descales(attention, kind)
    assert set(units) == {"q_descale", "k_descale"} and bench_inputs.descales(Attention(head_dim=64, dtype="e4m3"), kind) == {}
    scores = np.einsum("bqhd,bkd->bhqk", q.x, k.x[:, :, 0]) * attention.softmax_scale * units["q_descale"] * units["k_descale"]
    if kind == "normal":
        assert abs(scores.std() - 1) < 0.1
    else:
        assert abs((scores[..., :4].mean() - scores[..., 4:].mean()) - 8) < 1


@pytest.mark.parametrize(("text", "names"), [("none", ()), ("fa3", ("fa3",)), ("fa3, cudnn,fa3", ("fa3", "cudnn"))])
def test_peers_of_the_command_line(text, names):
    assert cli_bench.parse_peers(text) == names


def test_schedules_of_one_attention_share_a_case(kernel_folder, lab):
    run("fa3", "--set", "head_dim=64", "--causal", "--from", str(kernel_folder), "--shape", "1,2,2,100,100", "--rounds", "3")
    (spec,) = lab.specs
    (case,) = spec.cases
    assert case.kernels == (KernelRef("fa3", str(kernel_folder), "fa3.hd64-bf16-causal"),)
    assert spec.rounds == 3 and spec.peers == ("cudnn", "fa2", "fa3") and case.attention.mask == "causal"
    found = kernels("fa2", "fa3", settings=["head_dim=64", "mask=full"], grid="paper")
    grouped = needed.cases(found, [("d", "a"), ("d", "b")])
    assert len(grouped) == 6 and all([k.label for k in c.kernels] == ["fa2", "fa3"] for c in grouped)


def test_kernels_missing_from_a_folder(kernel_folder, lab):
    with pytest.raises(InputError, match=r"fa3\.hd64-fp16-full\.json: cannot be read"):
        run("fa3", "--set", "head_dim=64", "--set", "dtype=fp16", "--from", str(kernel_folder))
    assert lab.specs == []


def test_kernels_are_compiled_where_no_folder_is_given(lab, monkeypatch):
    def run_watched(spec, on_case, on_function):
        (ref,) = spec.cases[0].kernels
        assert os.path.exists(f"{ref.directory}/{ref.file}.cubin")
        lab.specs.append(spec)
        return lab.result

    monkeypatch.setattr(bench_watch, "run_watched", run_watched)
    run("fa3", "--set", "head_dim=64", "--json")
    assert not os.path.exists(lab.specs[0].cases[0].kernels[0].directory), "and cleared away"


def test_the_report_prints_losing_absent_and_wrong_rows(lab, kernel_folder, capsys, tmp_path):
    output = tmp_path / "results.json"
    common_options = ["fa3", "--set", "head_dim=64", "--full", "--from", str(kernel_folder), "--output", str(output)]
    assert run(*common_options) == 1, "one schedule is wrong"
    text, progress = capsys.readouterr()
    assert BenchResult.from_json(output.read_text()) == lab.result
    assert "0.800 of cudnn (slower)" in text and "tensor 60" in text and "memcpy 2.70, add 4.00" in text
    assert "fa3 wheel on hd128 bf16 causal: absent: not installed" in text
    assert "wrong on hd128 bf16 causal: wrong: out[0] is 1 where the reference has 2" in text
    assert "halved for a causal mask" in text and "800 TFLOP/s, 4.00 TB/s" in text and "NVIDIA H200" in text
    assert max(map(len, text.splitlines())) <= 200 and "measuring" in progress
    assert "geometric mean" not in text, "one case needs none"
    rows = tuple(r for r in lab.result.cases[0].rows if not r.bad)
    lab.result = replace(lab.result, cases=(replace(lab.result.cases[0], rows=rows),))
    assert run(*common_options, "--json") == 0, "losing is no failure"
    assert BenchResult.from_json(capsys.readouterr().out) == lab.result


def test_the_report_of_a_grid_ends_with_its_means(lab, kernel_folder, capsys):
    (case,) = lab.result.cases
    rows = tuple(replace(r, about="fa3 with tile_kv=96, 1234abcd: the reason") for r in case.rows if not r.bad)
    case = replace(case, rows=(rows[0], *(replace(r, about="") for r in rows[1:])))
    other = replace(case, problem=Problem(2, 512, 512, 16, 16))
    lab.result = replace(lab.result, cases=(with_ratio(case, 0.9), with_ratio(other, 1.6)))
    assert run("fa3", "--set", "head_dim=64", "--full", "--from", str(kernel_folder), "--inputs", "sink") == 0
    text = capsys.readouterr().out
    assert "schedules:\n  fa3: fa3 with tile_kv=96, 1234abcd: the reason\n" in text
    end = text[text.index("geometric mean") :]
    (burst,) = (line.split() for line in end.splitlines() if "burst" in line)
    assert burst[:2] == ["fa3", "burst"] and burst[-6:] == ["2", "1.200", "0.900", "1", "50", "1,16,16,1024,1024"]
    assert "sustained" in end and lab.specs[0].inputs == "sink"


# plans that quantise, in parts ----------------------------------------------------------------------------------------------


def test_parts_stand_beside_the_whole():
    """Of the schedules with precision only, in the same case as other schedules for the same tensors."""
    path = str(Path(fagen.__file__).parents[1] / "benchmarks" / "fp8_quantised.py")
    for head_dim in (64, 128, 256):
        own = fagen.load("fa3_fp8", head_dim=head_dim).schedule
        assert fagen.load(path, head_dim=head_dim).schedule == own.replace(precision="e4m3", hadamard=True), "it says so"
    found = kernels("fa3", path, grid="paper")
    cases = needed.cases(found, [("d", n.item.name) for n in found], parts=True)
    assert len(cases) == 36
    for case in cases:
        fa3, whole, *parts = case.kernels
        assert [k.part for k in case.kernels] == ["", "", "quantise", "attend"]
        assert [k.label for k in parts] == [f"{whole.label}, quantise", f"{whole.label}, attend"] and fa3.label == "fa3"
        assert {k.file for k in parts} == {whole.file}
    assert all(len(c.kernels) == 2 for c in needed.cases(found, [("d", n.item.name) for n in found]))


def test_kernels_that_quantise_are_judged_by_their_bytes(capsys):
    """Their share of the copy is of what they move, each read counted; they have no operations, and no ratio to a peer."""
    moved = 10**8
    candidates = [
        bench.Candidate(row("fp8"), FakeTask("fp8", 0.05)),
        bench.Candidate(
            replace(row("fp8, quantise"), part="quantise", bytes=moved, prediction=None), FakeTask("fp8, quantise", 0.03)
        ),
        bench.Candidate(replace(row("fp8, attend"), part="attend", prediction=None), FakeTask("fp8, attend", 0.02)),
        bench.Candidate(row("cudnn", "peer"), FakeTask("cudnn", 0.04)),
    ]
    spec = a_spec()
    found = bench.measure_case(spec.cases[0], candidates, FakeClock(), CEILINGS, spec, lambda: Reading(1980.0))
    whole, quantise, attend, _ = found.rows
    assert quantise.burst.copy_share == pytest.approx(moved / 0.03e-3 / 1e12 / 4.0)
    assert whole.burst.copy_share == pytest.approx(found.bytes / 0.05e-3 / 1e12 / 4.0)
    assert quantise.burst.ratio is None and whole.burst.ratio is not None and attend.burst.ratio is not None
    result = replace(a_result(), cases=(found,))
    assert BenchResult.from_json(result.to_json()) == result
    cli_bench.write(*cli_bench.report(result))
    (line,) = (x for x in capsys.readouterr().out.splitlines() if "fp8, quantise" in x)
    assert line.split()[2:] == ["0.03", "83", "1900"]
    text = markdown_table(result)
    assert "| `fp8, quantise` | hd128 bf16 causal | 1 × 1k | 100.0 | 30.0 | 3.33 | 83 % |" in text
    assert text.count("fp8, quantise") == 1, "it is in no table of TFLOP/s"
