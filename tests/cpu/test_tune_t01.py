"""Case T01: broken candidates never win and never hide; a winner is for its own key; records survive a killed tuner, and two at once."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_tuning import FA3, FULL, LONG, SHORT, FakeRunner

import fagen
from fagen import InputError, tuned
from fagen.explore import tune
from fagen.explore.timing import Interval
from fagen.explore.tune import predicted, prepare, pruned
from fagen.explore.tune_memory import Forgetful, StoreMemory
from fagen.explore.tune_result import Candidate, Prepared, Rate, TuneResult
from fagen.explore.tune_space import Space, enumerate_space
from fagen.explore.tune_store import Store, Stored
from fagen.plan.kernel import Problem

PARALLELISM = ("persistent_dynamic", "persistent_static", "query_tiles")
TILES = (80, 96, 112, 128, 144, 160, 176)
FAULTS = {
    176: "writes half the rows",
    160: "does nothing",
    144: "does not compile",
    128: "asks for too much shared memory",
    112: "traps",
}
"""The broken ones are the fastest."""


def prepared(runner: FakeRunner, problems: Sequence[Problem], tiles: Sequence[int] = TILES, **options: Any) -> Prepared:
    schedules = tuple(FA3.replace(tile_kv=t) for t in tiles)
    space = Space(FULL, schedules, 9, {"smem": 2}, 9)
    space, times = predicted(space, problems, runner)
    candidates, lost = pruned(space, times, problems, lambda s: f"c.{s.tile_kv}", **options)
    return prepare(space, candidates, lost, "fa3", schedules[0], runner)


def tuned_by(runner: FakeRunner, problems: Sequence[Problem] = (LONG,), tiles: Sequence[int] = TILES, memory: Any = None, **options: Any) -> TuneResult:  # fmt: skip
    done = prepared(runner, problems, tiles)
    return tune.tune(done, problems, runner, date="2026-11-29", memory=memory or Forgetful(), **options)


# only what is right is timed, and every failure is told ----------------------------------------------------------------------


def test_only_right_candidates_are_timed_and_the_slow_right_one_wins() -> None:
    runner = FakeRunner(FAULTS)
    result = tuned_by(runner)
    assert result.ok and result.shapes[0].winner == "c.96"
    assert 144 not in runner.verified
    assert {tiles for _, tiles, _ in runner.raced} == {(96, 80)}


def test_every_failure_is_kept_with_its_stage_reason_and_bundle() -> None:
    result = tuned_by(FakeRunner(FAULTS))
    (compiled,) = result.prepared.failures
    assert (compiled.name, compiled.stage, compiled.reason) == ("c.144", "compile", "error: expected a ';'")
    kept = {f.name: (f.stage, f.reason, f.bundle) for f in result.failures}
    assert kept == {
        "c.176": ("verify", "64 of 128 elements of out are NaN", None),
        "c.160": ("verify", "128 of 128 elements of out are NaN", None),
        "c.128": ("verify", "cuFuncSetAttribute failed: CUDA_ERROR_INVALID_VALUE", None),
        "c.112": ("verify", "the worker's process ended", "repro/x"),
    }


def test_a_candidate_that_is_wrong_on_one_problem_wins_on_none() -> None:
    result = tuned_by(FakeRunner({176: "wrong when long"}), (SHORT, LONG), tiles=(96, 176))
    assert [s.winner for s in result.shapes] == ["c.96", "c.96"]
    (failure,) = result.failures
    assert (failure.stage, failure.problem) == ("measure", str(LONG))
    assert "c.176" not in {r.name for s in result.shapes for r in s.final}


def test_nothing_left_is_no_winner_and_no_entry() -> None:
    result = tuned_by(FakeRunner(dict.fromkeys((80, 96), "does nothing")), tiles=(80, 96))
    assert not result.ok and tune.entries(result) == () and len(result.failures) == 2
    nothing = tuned_by(FakeRunner(dict.fromkeys((80, 96), "does not compile")), tiles=(80, 96))
    assert not nothing.ok and len(nothing.prepared.failures) == 2


def test_what_is_not_compiled_in_time_is_said() -> None:
    class Slow(FakeRunner):
        def compile(self, attention: Any, candidates: Any, heard: Any, expired: Any) -> Any:
            return super().compile(attention, candidates[:2], heard, expired)

    result = tuned_by(Slow())
    assert [f.name for f in result.prepared.failures] == [f"c.{t}" for t in (144, 128, 112, 96, 80)]
    assert {f.stage for f in result.prepared.failures} == {"budget"} and result.shapes[0].winner == "c.176"


# the model prunes, the race decides -------------------------------------------------------------------------------------------


def test_the_model_keeps_the_best_of_each_problem_and_what_must_stay() -> None:
    runner = FakeRunner(guess=lambda s, p: 500.0 - abs(s.tile_kv - (95 if p == SHORT else 159)))
    done = prepared(runner, (SHORT, LONG), keep=2, always=(FA3.replace(tile_kv=128),))
    assert {c.schedule.tile_kv for c in done.candidates} == {80, 96, 144, 160, 128}
    assert (done.legal, done.pruned) == (7, 2)
    assert set(done.candidates[0].predicted_us) == {str(SHORT), str(LONG)}
    assert [c.schedule.tile_kv for c in done.candidates][:2] == [160, 96], "the best come first, should time run out"


def test_of_those_that_differ_in_stages_and_parallelism_only_two_stay() -> None:
    """The model sees no difference between them: those with more slack."""
    dynamic, tiles = "persistent_dynamic", "query_tiles"
    many = tuple(FA3.replace(tile_kv=64, stages=n, parallelism=p) for n in (1, 2, 3) for p in (tiles, dynamic))
    space = Space(FULL, (*many, FA3), 9, {}, 9)
    _, times = predicted(space, (LONG,), FakeRunner(guess=lambda s, p: 600 - s.tile_kv))
    kept, _ = pruned(space, times, (LONG,), lambda s: s.id, keep=4)
    assert {(s.tile_kv, s.stages, s.parallelism) for s in (c.schedule for c in kept)} == {
        (64, 3, dynamic),
        (64, 3, tiles),
        (176, 2, dynamic),
    }


def test_of_a_sampled_space_the_model_climbs_to_what_the_sample_missed() -> None:
    """More combinations than are looked at: from the best of a sample, by neighbours, to the best there is; known ones stay out."""
    axes: dict[str, Any] = {
        "tile_kv": tuple(range(48, 180, 16)),
        "stages": (1, 2),
        "overlap": ("within", "both"),
        "parallelism": PARALLELISM,
    }
    best = FA3.replace(tile_kv=112, stages=2, overlap="within", parallelism="query_tiles")
    runner = FakeRunner(
        guess=lambda s, p: (
            500.0 - abs(s.tile_kv - 112) + 5 * s.stages_k + (s.overlap == "within") + (s.parallelism == "query_tiles")
        )
    )
    start = FA3.replace(tile_kv=48, stages=1)
    sample = enumerate_space(FULL, start, axes, exclude=[best.replace(overlap="both")], most=10, seed=3)
    assert sample.sampled and best not in sample.candidates
    grown, times = predicted(sample, (LONG,), runner, axes)
    assert best in grown.candidates and grown.enumerated < grown.combinations and set(times) == set(grown.candidates)
    assert best.replace(overlap="both") not in grown.candidates
    assert predicted(sample, (LONG,), runner)[0] == sample, "without knobs nothing is added"


def test_what_the_model_cannot_place_is_told() -> None:
    class Puzzled(FakeRunner):
        def predict(self, attention: Any, schedules: Any, problems: Any, heard: Any) -> Any:
            return ["a fault of fagen: KeyError: 'x'", *super().predict(attention, schedules[1:], problems, heard)]

    result = tuned_by(Puzzled(), tiles=(80, 96))
    assert [(f.name, f.stage) for f in result.prepared.failures] == [("c.80", "model")] and result.shapes[0].winner == "c.96"


def test_the_race_finds_the_best_behind_a_wrong_model_and_says_what_is_near() -> None:
    speed = {80: 700.0, 96: 700.1, 112: 650.0, 128: 600.0, 144: 550.0, 160: 500.0, 176: 690.0}
    runner = FakeRunner(speed=lambda s, p: speed[s.tile_kv], guess=lambda s, p: 400.0 + s.tile_kv, noise=0.003)
    shape = tuned_by(runner, peers=("fa3",), rounds=14).shapes[0]
    assert {shape.winner, *shape.within_noise} == {"c.80", "c.96"}
    assert {r.name for r in shape.screened} >= {"c.144", "c.160"} and shape.final[0].rounds == 14
    assert [len(names) for names in runner.rungs] == [7, 4, 3]
    assert shape.peers[0].vs_winner is not None and shape.peers[0].vs_winner.median == pytest.approx(390 / 700, rel=0.01)


def test_what_is_timed_beside_never_wins() -> None:
    runner = FakeRunner()
    done = prepared(runner, (LONG,), tiles=(80, 96))
    known = Candidate("t", FA3, beside=True)
    both = Prepared(**{**vars(done), "candidates": (*done.candidates, known)})
    shape = tune.tune(both, (LONG,), runner, date="2026-11-29", memory=Forgetful()).shapes[0]
    assert shape.winner == "c.96" and [r.name for r in shape.beside] == ["t"] and 176 in runner.verified
    assert shape.beside[0].tflops.median > shape.final[0].tflops.median


def test_results_round_trip() -> None:
    result = tuned_by(FakeRunner(FAULTS), (SHORT, LONG), peers=("fa3",))
    assert TuneResult.from_json(result.to_json()) == result
    assert Prepared.from_json(result.prepared.to_json()) == result.prepared


# winners in the table ----------------------------------------------------------------------------------------------------------


def test_winners_become_entries_that_choose_finds(tmp_path: Path) -> None:
    runner = FakeRunner(FAULTS | {96: "writes half the rows"}, noise=0.0)
    result = tuned_by(runner, (SHORT, LONG), peers=("cudnn", "fa3"))
    first, second = tune.entries(result)
    assert first.bucket == tuned.Bucket(512, "many") and second.bucket == tuned.Bucket(4096, "many")
    m = second.measured
    assert (m.problem, m.gpu, m.driver, m.compiler) == (str(LONG), "NVIDIA H200", "580.1, CUDA 13.0", "NVRTC 13")
    assert (m.fagen, m.date) == (fagen.__version__, "2026-11-29") and m.peer in ("cudnn", "fa3")
    assert m.tflops == pytest.approx(480, rel=0.06) and m.peer_tflops == pytest.approx(390, rel=0.06)
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


# records ------------------------------------------------------------------------------------------------------------------------


def memory(folder: Path, runner: FakeRunner, resume: bool = True, compiler: str = "NVRTC 13.5") -> StoreMemory:
    return StoreMemory(Store(folder), FULL, runner.device(), compiler, "2026-11-29", folder / "kernels", resume)


def test_a_record_for_each_candidate_problem_gpu_and_compiler(tmp_path: Path) -> None:
    runner = FakeRunner(FAULTS)
    tuned_by(runner, (SHORT, LONG), memory=memory(tmp_path, runner))
    records = list(Store(tmp_path))
    assert len(records) == 2 * 6, "what did not compile is the command's to record"
    stages = {(r.schedule.tile_kv, r.problem): r.stage for r in records}
    assert stages[96, LONG] == stages[80, SHORT] == "timed" and stages[112, LONG] == "verify"
    best = next(r for r in records if r.schedule.tile_kv == 96 and r.problem == LONG)
    assert best.ms is not None and best.rounds == 14 and best.predicted_us and len(best.code_sha256) == 64
    assert (best.gpu, best.compiler, best.bucket) == ("NVIDIA H200", "NVRTC 13.5", "seqlen_k 4096, many tiles")
    assert Stored.from_json(best.to_json()) == best
    assert len({p.name for p in tmp_path.glob("*.json")}) == len(records) and not list(tmp_path.glob(".new-*"))


def test_a_killed_tune_goes_on_where_it_was(tmp_path: Path) -> None:
    """Killed in the middle of the race on 4096 keys: what was wrong is not verified again, what was timed is timed again only near the best."""

    class Killed(FakeRunner):
        def race(self, attention: Any, work: Any, peers: Any, rounds: int, heard: Any, progressed: Any, deadline: Any) -> Any:
            super().race(attention, work[:1], peers, rounds, heard, progressed, deadline)
            super().race(attention, work[1:], peers, 2, heard, progressed, deadline)  # the first rung is recorded
            raise KeyboardInterrupt

    faults = {176: "does nothing", 112: "traps"}
    with pytest.raises(KeyboardInterrupt):
        killed = Killed(faults)
        tuned_by(killed, (SHORT, LONG), memory=memory(tmp_path, killed))
    again = FakeRunner(faults)
    result = tuned_by(again, (SHORT, LONG), memory=memory(tmp_path, again))
    assert again.verified == [], "every candidate was either right or known to be wrong"
    assert {f.name for f in result.failures} == {"c.176", "c.112"} and all(
        "(stored, 2026-11-29)" in f.reason for f in result.failures
    )
    assert [s.winner for s in result.shapes] == ["c.160", "c.160"] and [s.reused for s in result.shapes] == [7, 7]
    assert again.rungs[0] == (), "nothing is measured in a first rung of which all is known"
    slow = next(r for r in result.shapes[1].screened if r.name == "c.80")
    assert slow.rounds == 0 and slow.tflops.median == pytest.approx(480, rel=0.06)


def test_records_count_for_the_same_problem_code_compiler_and_gpu_only(tmp_path: Path) -> None:
    runner = FakeRunner()
    tuned_by(runner, (LONG,), tiles=(80,), memory=memory(tmp_path, runner))
    c = Candidate("c.80", FA3.replace(tile_kv=80))
    near = Problem(4, 4096, 4095, 16, 16)  # of the same bucket
    assert memory(tmp_path, runner).time_ms(c, LONG) is not None
    assert memory(tmp_path, runner).time_ms(c, near) is None
    assert memory(tmp_path, runner, resume=False).time_ms(c, LONG) is None
    assert memory(tmp_path, runner, compiler="NVRTC 13.0").time_ms(c, LONG) is None
    assert memory(tmp_path, FakeRunner(name="NVIDIA H100")).time_ms(c, LONG) is None
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"code_sha256": "0" * 64}))
    assert memory(tmp_path, runner).time_ms(c, LONG) is None, "another version of fagen emits other code"
    path.write_text(json.dumps({"schema": 99}))
    assert memory(tmp_path, runner).time_ms(c, LONG) is None


def test_two_tuners_write_whole_records(tmp_path: Path) -> None:
    rate = Rate("c", Interval(1.0, 1.0, 1.0, 0.5), Interval(2.0, 2.0, 2.0, 0.5), 2)
    runner = FakeRunner()
    memories = [memory(tmp_path, runner) for _ in range(2)]

    def write(m: StoreMemory) -> None:
        for t in (64, 80, 96):
            for _ in range(10):
                m.keep(Candidate(f"c.{t}", FA3.replace(tile_kv=t)), LONG, "timed", "", rate, None)

    threads = [threading.Thread(target=write, args=(m,)) for m in memories]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [r.schedule.tile_kv for r in sorted(Store(tmp_path), key=lambda r: r.schedule.tile_kv)] == [64, 80, 96]
    assert not list(tmp_path.glob(".new-*"))
