"""Tuning without a GPU: what is tried, that broken candidates never win and never hide (case T01), and the command."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import fagen
from fagen import Attention, InputError, LaunchError, Schedule, cli, load, tuned
from fagen.check import CaseResult as CheckResult
from fagen.explore import bench_lab, tune, tune_run
from fagen.explore.bench_result import BenchSpec, CaseResult, Row, Timing
from fagen.explore.timing import Interval, Reading
from fagen.explore.tune import Candidate, Gpu, Measurement, Prepared, TuneResult, Work, prepare
from fagen.explore.tune_run import Workshop, verify_problems
from fagen.explore.tune_space import Space, default_axes, enumerate_space
from fagen.guard import GuardError
from fagen.oracle import Verdict
from fagen.plan.kernel import Problem

HERE = Path(__file__).parent
FULL = Attention(head_dim=128)
FA3 = load("fa3").schedule
SHORT, LONG = Problem(32, 512, 512, 16, 16), Problem(4, 4096, 4096, 16, 16)


# what is tried ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", tuned.builtin_tables()[0].entries, ids=lambda e: e.label)
def test_default_spaces_contain_the_winners_of_the_table(entry: tuned.Entry) -> None:
    attention, base = load("fa3", head_dim=entry.head_dim, dtype=entry.dtype, mask=entry.mask)
    space = enumerate_space(attention, base, default_axes(attention, base))
    assert entry.schedule in space.candidates
    assert base in space.candidates and len(space.candidates) < 130


def test_default_spaces_contain_fused_tiles() -> None:
    """Short sequences at head_dim 64 want long blocks with the next tile's first product under the epilogue."""
    attention, base = load("fa3", head_dim=64, mask="causal")
    wanted = {"tile_q": 128, "consumers": 2, "tile_kv": 128, "stages": 4, "overlap": "within", "reference": "stale"}
    space = enumerate_space(attention, base, default_axes(attention, base))
    assert base.replace(**wanted, fuse_tiles=True) in space.candidates and base.replace(**wanted) in space.candidates


@pytest.mark.parametrize("name", ["fa2", "fa3", "fa3_fp8"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_every_built_in_has_a_default_space_of_legal_schedules(name: str, head_dim: int, mask: str) -> None:
    attention, base = load(name, head_dim=head_dim, mask=mask)
    space = enumerate_space(attention, base, default_axes(attention, base))
    assert len(space.candidates) >= 5 and len(set(space.candidates)) == len(space.candidates)
    for schedule in space.candidates:
        tuned.check(attention, schedule)


def test_illegal_combinations_are_counted_by_code() -> None:
    space = enumerate_space(FULL, FA3, {"tile_kv": (96, 100, 128), "stages": (1, 2, 3, 9)})
    assert space.enumerated == 1 + 12  # fa3 itself has 176 keys
    assert space.illegal == {"tile-kv": 4, "stages": 3}
    wanted = {(176, 2)} | {(tile_kv, stages) for tile_kv in (96, 128) for stages in (1, 2, 3)}
    assert {(s.tile_kv, s.stages) for s in space.candidates} == wanted


def test_tile_q_follows_the_consumers_unless_it_is_asked_for() -> None:
    attention, base = load("fa3", head_dim=64)
    followed = enumerate_space(attention, base, {"consumers": (1, 2, 3), "tile_kv": (64,), "overlap": ("within",)})
    assert {(s.consumers, s.tile_q) for s in followed.candidates} == {(1, 64), (2, 128), (3, 192)}
    asked = enumerate_space(attention, base, {"consumers": (2, 3), "tile_q": (128, 192)})
    assert {(s.consumers, s.tile_q) for s in asked.candidates} == {(2, 128), (3, 192)} and asked.illegal == {"tile-q": 2}


def test_pinned_knobs_stay_and_more_schedules_join_once() -> None:
    known = FA3.replace(tile_kv=112, stages=1)
    space = enumerate_space(FULL, FA3, default_axes(FULL, FA3), pinned=("tile_kv",), also=(known, FA3))
    assert {s.tile_kv for s in space.candidates} == {176, 112} and known in space.candidates


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"tile_kv": ()}, "tile_kv: has no values"),
        (
            {"tile_kv": (100,), "tile_q": (64,)},
            "none of 2 schedules is legal for hd128 bf16 full; the given one itself: \\[tile-kv\\]",
        ),
    ],
)
def test_a_space_without_candidates_is_refused(axes: dict[str, Any], message: str) -> None:
    base = FA3.replace(tile_kv=100)
    with pytest.raises(InputError, match=message):
        enumerate_space(FULL, base, axes)


def test_verification_covers_what_breaks_kernels() -> None:
    problems = verify_problems(FULL, FA3)
    assert {"normal", "sink", "growing"} <= {p.inputs for p in problems}
    assert any(p.sk == 0 for p in problems) and any(p.sq > p.sk > 0 for p in problems) and any(p.hq > p.hkv for p in problems)
    assert any(p.batch * p.hq >= 132 for p in problems) and len(problems) < 20
    assert "descaled" in {p.inputs for p in verify_problems(Attention(head_dim=128, dtype="e4m3"), load("fa3_fp8").schedule)}


# case T01: broken candidates, on a fake runner ------------------------------------------------------------------------------


def interval(x: float) -> Interval:
    return Interval(x, x - 1, x + 1, 0.97)


@dataclass
class FakeRunner:
    """A machine on which each candidate does what its fault says, at a speed that its tile_kv tells. The broken ones are the fastest."""

    faults: Mapping[int, str] = field(default_factory=dict)
    speed: Callable[[Schedule, Problem], float] = lambda s, p: float(s.tile_kv)
    name: str = "NVIDIA H200"
    measured: list[tuple[Problem, tuple[int, ...], tuple[str, ...], int]] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)

    def fault(self, candidate: Candidate) -> str:
        return self.faults.get(candidate.schedule.tile_kv, "")

    def device(self) -> Gpu:
        return Gpu(self.name, 132, "580.1, CUDA 13.0")

    def compile(self, attention: Attention, candidates: Sequence[Candidate], heard: Any) -> dict[str, str]:
        reasons = {
            "does not compile": "error: expected a ';'",
            "spills": "spills 24 bytes",
            "crashes the compiler": "signal SIGSEGV",
        }
        return {c.name: reasons.get(self.fault(c), "") for c in candidates}

    def verify(self, attention: Attention, candidates: Sequence[Candidate], heard: Any) -> dict[str, str]:
        self.verified += [c.schedule.tile_kv for c in candidates]
        reasons = {
            "writes half the rows": "64 of 128 elements of out are NaN",
            "does nothing": "128 of 128 elements of out are NaN",
            "asks for too much shared memory": "cuFuncSetAttribute failed: CUDA_ERROR_INVALID_VALUE",
            "traps": "the worker's process ended",
        }
        return {c.name: reasons.get(self.fault(c), "") for c in candidates}

    def measure(
        self, attention: Attention, work: Sequence[Work], peers: Sequence[str], rounds: int, heard: Any
    ) -> list[Measurement]:
        found = []
        for w in work:
            self.measured.append((w.problem, tuple(c.schedule.tile_kv for c in w.candidates), tuple(peers), rounds))
            wrong = {c.name for c in w.candidates if self.fault(c) == "wrong when long" and w.problem.sk > 1000}
            rates = {c.name: interval(self.speed(c.schedule, w.problem)) for c in w.candidates if c.name not in wrong}
            found.append(
                Measurement(rates, {n: interval(90.0) for n in peers}, dict.fromkeys(wrong, "wrong: error 3 > 1"), "NVRTC 13")
            )
        return found


def prepared(runner: Any, tiles: Sequence[int] = (80, 96, 112, 128, 144, 160, 176), base: str = "fa3") -> Prepared:
    space = Space(FULL, tuple(FA3.replace(tile_kv=t) for t in tiles), 9, {"smem": 2})
    return prepare(space, base, lambda s: f"c.{s.tile_kv}", runner)


def tuned_by(
    runner: Any, problems: Sequence[Problem] = (LONG,), tiles: Sequence[int] = (80, 96, 112, 128, 144, 160, 176), **options: Any
) -> TuneResult:
    return tune.tune(prepared(runner, tiles), problems, runner, date="2026-11-29", **options)


FAULTS = {
    176: "writes half the rows",
    160: "does nothing",
    144: "does not compile",
    128: "asks for too much shared memory",
    112: "traps",
}


def test_only_right_candidates_are_timed_and_the_slow_right_one_wins() -> None:
    runner = FakeRunner(FAULTS)
    result = tuned_by(runner)
    assert result.ok and result.shapes[0].winner == "c.96"
    assert 144 not in runner.verified
    assert [tiles for _, tiles, _, _ in runner.measured] == [(80, 96)]


def test_every_failure_is_kept_with_its_stage_and_reason() -> None:
    result = tuned_by(FakeRunner(FAULTS))
    (compiled,) = result.prepared.failures
    assert (compiled.name, compiled.stage, compiled.reason) == ("c.144", "compile", "error: expected a ';'")
    kept = {f.name: (f.stage, f.reason) for f in result.failures}
    assert kept == {
        "c.176": ("verify", "64 of 128 elements of out are NaN"),
        "c.160": ("verify", "128 of 128 elements of out are NaN"),
        "c.128": ("verify", "cuFuncSetAttribute failed: CUDA_ERROR_INVALID_VALUE"),
        "c.112": ("verify", "the worker's process ended"),
    }


def test_a_candidate_that_is_wrong_on_one_problem_wins_on_none() -> None:
    runner = FakeRunner({176: "wrong when long"})
    result = tuned_by(runner, (SHORT, LONG), tiles=(96, 176))
    assert [s.winner for s in result.shapes] == ["c.96", "c.96"]
    (failure,) = result.failures
    assert (failure.stage, failure.problem) == ("measure", str(LONG))
    assert "c.176" not in {r.name for s in result.shapes for r in s.final}


def test_a_wrong_candidate_of_the_screen_is_no_finalist() -> None:
    runner = FakeRunner({176: "wrong when long"})
    result = tuned_by(runner, (SHORT, LONG), finalists=2)
    assert [s.winner for s in result.shapes] == ["c.160", "c.160"]
    assert all(176 not in tiles for _, tiles, _, _ in runner.measured[2:])


def test_many_candidates_are_screened_and_few_meet_the_peers() -> None:
    runner = FakeRunner(speed=lambda s, p: 1e3 - abs(s.tile_kv - (96 if p == SHORT else 144)))
    result = tuned_by(runner, (SHORT, LONG), peers=("cudnn", "fa3"), rounds=9, finalists=3)
    assert [(p, peers, rounds) for p, _, peers, rounds in runner.measured] == [
        (SHORT, (), tune.SCREEN_ROUNDS),
        (LONG, (), tune.SCREEN_ROUNDS),
        (SHORT, ("cudnn", "fa3"), 9),
        (LONG, ("cudnn", "fa3"), 9),
    ]
    assert set(runner.measured[2][1]) == {80, 96, 112} and set(runner.measured[3][1]) == {128, 144, 160}
    assert [s.winner for s in result.shapes] == ["c.96", "c.144"]
    assert len(result.shapes[0].screened) == 7 and [r.name for r in result.shapes[0].peers] == ["cudnn", "fa3"]


def test_nothing_left_is_no_winner_and_no_entry() -> None:
    result = tuned_by(FakeRunner(dict.fromkeys((80, 96), "does nothing")), tiles=(80, 96))
    assert not result.ok and tune.entries(result) == () and len(result.failures) == 2
    nothing = tuned_by(FakeRunner(dict.fromkeys((80, 96), "does not compile")), tiles=(80, 96))
    assert not nothing.ok and len(nothing.prepared.failures) == 2


def test_results_round_trip() -> None:
    result = tuned_by(FakeRunner(FAULTS), (SHORT, LONG), peers=("fa3",))
    assert TuneResult.from_json(result.to_json()) == result
    assert Prepared.from_json(result.prepared.to_json()) == result.prepared


def test_winners_become_entries_that_choose_finds(tmp_path: Path) -> None:
    runner = FakeRunner(FAULTS | {96: "writes half the rows"})
    result = tuned_by(runner, (SHORT, LONG), peers=("cudnn", "fa3"))
    first, second = tune.entries(result)
    assert first.bucket == tuned.Bucket(512, "many") and second.bucket == tuned.Bucket(4096, "many")
    assert second.measured == tuned.Measured(
        str(LONG), 80.0, "cudnn", 90.0, "NVIDIA H200", "580.1, CUDA 13.0", "NVRTC 13", fagen.__version__, "2026-11-29"
    )
    table = tuned.record(tmp_path / "t.json", (first, second), tuned.builtin_tables()[0])
    assert tuned.choose(FULL, LONG, tuned.H200, [table]).schedule.tile_kv == 80


def test_a_winner_is_for_its_own_key(tmp_path: Path) -> None:
    """Tuned for 4096 keys; asked for 48 keys, another dtype, the other mask, another GPU: an entry of theirs, or the nearest, said so."""
    table = tuned.record(tmp_path / "t.json", tune.entries(tuned_by(FakeRunner())), tuned.Table("sm_90a", "H200", ()))
    own = tuned.choose(FULL, LONG, tuned.H200, [table])
    assert own.schedule.tile_kv == 176 and own.why.startswith("the tuned table's entry for")
    h100 = tuned.KnownDevice("NVIDIA H100", (9, 0), 132, 227 << 10)
    for attention, problem, device in (
        (FULL, Problem(4, 4096, 48, 16, 16), tuned.H200),
        (FULL.replace(dtype="fp16"), LONG, tuned.H200),
        (FULL.replace(mask="causal"), LONG, tuned.H200),
        (FULL, LONG, h100),
    ):
        other = tuned.choose(attention, problem, device, [table])
        assert "has no entry for" in other.why and "the nearest is hd128 bf16 full, seqlen_k 4096" in other.why
    assert tuned.choose(FULL.replace(dtype="e4m3"), LONG, tuned.H200, [table]).entry is None


def test_two_problems_of_a_bucket_are_refused() -> None:
    near = Problem(4, 4000, 4200, 16, 16)
    tune.check_buckets([SHORT, LONG, LONG], 132)
    with pytest.raises(InputError, match=f"{LONG} and {near} are in one bucket"):
        tune.check_buckets([SHORT, LONG, near], 132)


# the workshop: compiling in processes -----------------------------------------------------------------------------------------


def compile_with_faults(request: Mapping[str, Any], channel: Any) -> None:
    """A compile task whose compiler dies at some candidates (run in the worker)."""
    for job in request["jobs"]:
        channel.doing(f"{job['name']} is compiled", 60)
        if job["schedule"]["tile_kv"] in (96, 144):
            os.abort()
        channel.send("done_one", name=job["name"], reason="")


def test_a_compiler_that_crashes_costs_its_candidate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setattr(tune_run, "COMPILE_TASK", "test_tune:compile_with_faults")
    monkeypatch.setattr(tune_run, "MOST_AT_ONCE", 3)
    heard: list[str] = []
    candidates = [Candidate(f"c.{t}", FA3.replace(tile_kv=t)) for t in (80, 96, 112, 128, 144, 160)]
    reasons = Workshop(tmp_path, 1).compile(FULL, candidates, heard.append)
    assert {n for n, why in reasons.items() if why} == {"c.96", "c.144"}
    assert "signal SIGABRT" in reasons["c.96"] and reasons["c.96"].startswith("c.96 is compiled")
    assert sorted(heard) == sorted(reasons) == sorted(c.name for c in candidates)


def test_candidates_are_built_for_another_machine(tmp_path: Path) -> None:
    schedules = (FA3.replace(tile_kv=80), FA3.replace(tile_kv=100))
    space = Space(FULL, schedules, 2, {})
    done = prepare(space, "fa3", lambda s: f"c.{s.tile_kv}", Workshop(tmp_path, 2))
    assert [c.name for c in done.candidates] == ["c.80"]
    (failure,) = done.failures
    assert failure.name == "c.100" and "[tile-kv]" in failure.reason
    assert {p.name for p in tmp_path.iterdir()} == {"c.80.cu", "c.80.cubin", "c.80.json"}


# the workshop: on a GPU that is made up -----------------------------------------------------------------------------------------


def built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_run, "load_built", lambda folder, name: name)


RIGHT, WRONG = Verdict(True, 0.1, 1.0, 0.1), Verdict(False, 2.0, 1.0, 2.0, "error 2 is above the bound 1")
CANDIDATES = [Candidate(f"c.{t}", FA3.replace(tile_kv=t)) for t in (80, 96, 112, 128)]


def test_verification_goes_on_behind_a_kernel_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built(monkeypatch)
    runs: list[list[str]] = []

    def check_gpu(items: Any, builts: Any, *, seed: int, bundles: None, on_result: Callable[[CheckResult], None]) -> None:
        assert builts == [i.name for i in items]
        runs.append([i.name for i in items])
        for item in items:
            for n, problem in enumerate(item.problems):
                if item.name == "c.96" and n == 2:
                    raise LaunchError("launch of c.96 hangs") from GuardError("hang", "launch of c.96", "no sign of life for 20 s")
                on_result(CheckResult(item.name, problem, "full", seed + n, WRONG if item.name == "c.128" and n == 1 else RIGHT))

    monkeypatch.setattr(tune_run, "check_gpu", check_gpu)
    reasons = Workshop(tmp_path, 1).verify(FULL, CANDIDATES, tune.silent)
    assert runs == [["c.80", "c.96", "c.112", "c.128"], ["c.112", "c.128"]]
    assert reasons["c.80"] == reasons["c.112"] == "" and reasons["c.96"] == "launch of c.96 hangs"
    assert "error 2 is above the bound 1" in reasons["c.128"]


def test_a_machine_that_cannot_verify_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built(monkeypatch)

    def check_gpu(*_: Any, **__: Any) -> None:
        raise LaunchError("kernels for sm_90a run on compute capability 9.0, not on this")

    monkeypatch.setattr(tune_run, "check_gpu", check_gpu)
    with pytest.raises(LaunchError, match="compute capability"):
        Workshop(tmp_path, 1).verify(FULL, CANDIDATES, tune.silent)


def timing(tflops: float) -> Timing:
    one = interval(tflops)
    return Timing(one, one, tflops, None, None, 1.0, 1.0, None, (1.0,), 1)


def row(name: str, kind: str, timed: Timing | None, reason: str = "") -> Row:
    values = {"function": name, "kind": kind, "burst": timed, "reason": reason, "outcome": "timed" if timed else "wrong"}
    if kind == "schedule":
        values["compiler"] = "NVRTC 13"
    return Row(**{n: values.get(n) for n in Row.__dataclass_fields__})


class FakeBench:
    """Stands in for `run_watched`: some functions are wrong, some end the run."""

    def __init__(self, wrong: str = "", deadly: Mapping[str, int] | None = None):
        self.wrong, self.deadly = wrong, dict(deadly or {})
        self.specs: list[BenchSpec] = []

    def __call__(self, spec: BenchSpec, on_case: Any, on_function: Any, bundles: Any) -> None:
        self.specs.append(spec)
        for n, case in enumerate(spec.cases):
            rows = []
            for ref in case.kernels:
                on_function(n, ref.label)
                if self.deadly.get(ref.label) == case.problem.sk:
                    raise LaunchError(f"{ref.label} ended the GPU context")
                fine = None if ref.label == self.wrong else timing(700.0 + len(rows))
                rows.append(row(ref.label, "schedule", fine, "" if fine else "error 3 > 1"))
            for peer in spec.peers:
                on_function(n, peer)
                if self.deadly.get(peer) == case.problem.sk:
                    raise LaunchError(f"{peer} ended the GPU context")
                rows.append(row(f"{peer} (torch)", "peer", timing(600.0)))
            on_case(CaseResult(case.attention, case.problem, 1, 1, 1, Reading(), Reading(), tuple(rows)))


WORK = [Work(SHORT, tuple(CANDIDATES)), Work(LONG, tuple(CANDIDATES))]


def test_a_kernel_that_ends_a_measurement_costs_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bench = FakeBench(wrong="c.80", deadly={"c.112": LONG.sk})
    monkeypatch.setattr(tune_run, "run_watched", bench)
    short, long = Workshop(tmp_path, 1).measure(FULL, WORK, ("cudnn",), 5, tune.silent)
    assert set(short.rates) == {"c.96", "c.112", "c.128"} and short.failed == {"c.80": "wrong: error 3 > 1"}
    assert set(long.rates) == {"c.96", "c.128"}
    assert long.failed == {"c.80": "wrong: error 3 > 1", "c.112": "c.112 ended the GPU context"}
    assert short.peers["cudnn (torch)"].median == 600.0 and short.compiler == "NVRTC 13"
    assert [len(s.cases) for s in bench.specs] == [2, 1], "what is done is not done again"
    assert all(s.rounds == 5 and not s.sustained for s in bench.specs)


def test_a_peer_that_ends_the_context_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tune_run, "run_watched", FakeBench(deadly={"cudnn": SHORT.sk}))
    with pytest.raises(LaunchError, match="cudnn ended the GPU context"):
        Workshop(tmp_path, 1).measure(FULL, WORK, ("cudnn",), 5, tune.silent)


# the command --------------------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.run(["tune", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeRunner:
    """A fake GPU behind the command."""
    runner = FakeRunner({96: "does nothing"})
    monkeypatch.setattr(tune_run, "Workshop", lambda *_, **__: runner)
    monkeypatch.setattr(bench_lab, "check_device", lambda: None)
    return runner


def test_no_gpu_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def absent() -> Any:
        raise LaunchError("no GPU: the CUDA driver sees no device")

    monkeypatch.setattr(fagen.driver, "api", absent)
    code, out, err = run(capsys, "fa3", "--over", "tile_kv=96:128")
    assert (code, out, err) == (1, "", "fagen: no GPU: the CUDA driver sees no device\n")


def test_the_command_tells_winner_failures_and_legality(
    machine: FakeRunner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, output = tmp_path / "mine.json", tmp_path / "out.json"
    code, out, err = run(capsys, "fa3", "--shape", "4,16,16,4096,4096", "--over", "tile_kv=80:96:100:128", "--over", "overlap=both", "--vs", "fa3", "--table", str(table), "--output", str(output))  # fmt: skip
    assert code == 0
    assert "1 break tile-kv" in err and "1 break tile-kv" in out
    assert "verify: 1 × 128 of 128 elements of out are NaN" in out
    assert "(winner)" in out and "fa3" in out
    result = TuneResult.from_json(output.read_text())
    assert result.shapes[0].winner == f"fa3.hd128-bf16-full.{FA3.id}"
    assert "1 entry written" in err
    new = tuned.read(table)
    assert len(new.entries) == len(tuned.builtin_tables()[0].entries)
    assert tuned.choose(FULL, LONG, tuned.H200, [new]).schedule == FA3


def test_the_tables_own_schedules_are_always_among_the_candidates(machine: FakeRunner, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "fa3", "--shape", "4,16,16,4096,4096", "--over", "tile_kv=80", "--json")
    names = {c["name"] for c in json.loads(out)["prepared"]["candidates"]}
    known = {e.schedule_id for e in tuned.builtin_tables()[0].entries if e.head_dim == 128}
    assert code == 0 and {f"fa3.hd128-bf16-full.{i}" for i in known} <= names


def test_built_here_and_measured_there(machine: FakeRunner, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "fa3", "--causal", "--over", "tile_kv=80:96", "--build-only", str(tmp_path))
    assert code == 0 and "candidates for hd128 bf16 causal compiled into" in out
    assert (tmp_path / "fa3.hd128-bf16-causal.tune.json").is_file() and not machine.measured
    code, out, _ = run(capsys, "fa3", "--causal", "--from", str(tmp_path), "--grid", "paper", "--json")
    result = TuneResult.from_dict(json.loads(out))
    assert code == 0 and len(result.shapes) == 6 and result.prepared.attention.mask == "causal"
    code, _, err = run(capsys, "fa3", "--from", str(tmp_path))
    assert code == 2 and "fagen tune --build-only writes it" in err


def test_a_size_without_a_winner_is_exit_code_1(machine: FakeRunner, capsys: pytest.CaptureFixture[str]) -> None:
    machine.faults = dict.fromkeys(range(257), "does nothing")
    code, out, _ = run(capsys, "fa3", "--shape", "4,16,16,4096,4096", "--over", "tile_kv=80")
    assert code == 1 and "4,16,16,4096,4096: no candidate was left" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--over", "tile_kv"), "--over: 'tile_kv' is not knob=value:value"),
        (("--over", "tile_kw=96"), "did you mean tile_kv"),
        (("--over", "tile_kv=96", "--over", "tile-kv=80"), "--over: tile_kv is given twice"),
        (("--over", "tile_kv=96", "--set", "tile_kv=80"), "--over: tile_kv is fixed by --set tile_kv=80"),
        (("--shape", "1,2,3"), "--shape: '1,2,3' is not B,HQ,HKV,SQ,SK"),
        (("--shape", "1,2,2,0,5"), "every size must be at least 1"),
        (("--grid", "papers"), "no grid 'papers'"),
        (("--vs", "fa9"), "no peer 'fa9'"),
        (("--build-only", "x", "--from", "y"), "one of them is enough"),
        (("--build-only", "x", "--table", "t.json"), "--build-only: measures nothing"),
        (("--from", "/nowhere"), "there is no folder /nowhere"),
        (("--build-only", "/dev/null/x"), "--build-only: /dev/null/x cannot be made"),
        (("--output", "/nowhere/x.json"), "--output: /nowhere/x.json cannot be written"),
        (("--set", "head_dim=80"), "none of 168 schedules is legal for hd80 bf16 full; the given one itself: [head-dim]"),
    ],
)
def test_mistakes_on_the_command_line(arguments: tuple[str, ...], message: str, machine: FakeRunner, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "fa3", *arguments)
    assert code == 2 and out == "" and message in err, err


def test_a_table_is_for_hopper_schedules(machine: FakeRunner, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, "fa2", "--table", str(tmp_path / "t.json"))
    assert code == 2 and "--table: holds schedules for sm_90a; fa2 is for sm_90" in err
