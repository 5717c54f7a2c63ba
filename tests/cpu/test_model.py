"""The model: the program replayed with a clock. Against what is known on paper, against measurements, and as `fagen model` reports it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fagen import cli, load
from fagen.errors import InternalError
from fagen.explore import bench_watch, model, model_set, pace
from fagen.explore.bench_result import BenchResult
from fagen.explore.engine import Engine, Signal, Unit
from fagen.explore.machine import H200
from fagen.explore.model import predict_time
from fagen.explore.model_report import compare, judged, known_schedules, spearman
from fagen.explore.replay import HANDLERS, PLAIN, replay
from fagen.explore.roofline import contiguous
from fagen.plan import Plan, Problem, assemble
from fagen.plan import steps as step_kinds
from fagen.plan.kernel import KernelPlan, scalar_env
from fagen.plan.rules import check
from fagen.plan.steps import Step

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
LONG = Problem(1, 16384, 16384, 16, 16)


def planned(name: str, **changes: object) -> Plan:
    return assemble(*load(name, **changes))


def time_us(name: str, problem: Problem = LONG, **changes: object) -> float:
    return predict_time(planned(name, **changes), problem).time_us


def scalars_of(plan: Plan, problem: Problem, sms: int = 1) -> tuple[KernelPlan, dict[str, int]]:
    launch = plan.bind(problem, contiguous(plan.attention, problem), sms)
    sizes = {f: getattr(problem, f) for f in ("batch", "sq", "sk", "hq", "hkv")}
    return plan.kernels[0], sizes | scalar_env(plan.kernels[0], launch.kernels[0])


# the engine --------------------------------------------------------------------------------------------------------------------


def test_actors_wait_for_times_signals_and_units() -> None:
    engine, signal, unit, told = Engine(), Signal(), Unit(), []

    def first() -> Any:
        yield 10.0
        yield unit.serve(engine.now, 5.0)
        engine.fire(signal)
        told.append(("first", engine.now))

    def second() -> Any:
        yield signal
        told.append(("second", engine.now))
        yield signal  # has happened: no wait
        yield unit.serve(engine.now, 1.0)
        told.append(("second", engine.now))

    def third() -> Any:
        yield 12.0
        yield unit.serve(engine.now, 3.0)  # behind the first's five
        told.append(("third", engine.now))

    for actor in (first(), second(), third()):
        engine.start(actor)
    assert engine.run() == 19.0 and unit.busy == 9.0
    assert told == [("first", 15.0), ("second", 15.0), ("third", 18.0), ("second", 19.0)]


# every step has its time --------------------------------------------------------------------------------------------------------


def test_every_kind_of_step_has_a_pace_or_a_handler() -> None:
    control = {"Let", "Var", "Set", "Loop", "Forever", "Break", "If", "Elected", "Vote"}
    kinds = {c.__name__ for c in vars(step_kinds).values() if isinstance(c, type) and issubclass(c, Step) and c is not Step}
    handled = {k.__name__ for k in (*HANDLERS, *PLAIN)}
    assert kinds == control | handled | set(pace.PACES)
    assert not handled & set(pace.PACES) - {"GetTile"}


def test_a_step_without_one_is_a_fault_of_ours() -> None:
    class Novel(Step):
        pass

    kernel = planned("fa3").kernels[0]
    with pytest.raises(InternalError, match="nobody has said how long a Novel takes"):
        pace.pace(kernel, kernel.roles[0], Novel(id="x.novel"))


@pytest.mark.parametrize("name", ["standard", "fa1", "fa2", "fa3", "fa3_fp8"])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_programs_come_to_their_end(name: str, mask: str) -> None:
    """Also on no key, one key and ragged edges; `replay` raises where a role waits for ever."""
    plan = planned(name, mask=mask)
    for problem in (Problem(1, 128, 0, 1, 1), Problem(2, 1, 1, 2, 1), Problem(1, 333, 1111, 2, 2)):
        assert 0 < predict_time(plan, problem).time_us < 1000


def test_a_program_that_waits_for_ever_is_told() -> None:
    kernel, scalars = scalars_of(planned("fa3"), Problem(1, 128, 1000, 1, 1))
    (producer, consumer) = kernel.roles
    mute = replace(kernel, roles=(replace(producer, body=producer.body[:1]), consumer))
    with pytest.raises(InternalError, match=r"the model's clock stops before its program ends \(2 roles wait\)"):
        replay(mute, scalars, [0])


def test_the_tensor_cores_work_as_long_as_the_products_are() -> None:
    """Two warpgroups, eight blocks: 2 · 64 · 128 · 176 · 2 multiply-adds each, 2048 a clock."""
    kernel, scalars = scalars_of(planned("fa3"), Problem(1, 128, 8 * 176, 1, 1))
    found = replay(kernel, scalars, [0])
    assert found.tensor == pytest.approx(8 * 2 * 2 * 64 * 128 * 176 / 2048)
    assert found.mufu > 8 * 2 * 64 * 176 / 16 and found.clocks > found.tensor


# what a knob does ----------------------------------------------------------------------------------------------------------------


def test_overlap_pays_as_it_does_in_the_chain_of_schedules() -> None:
    """head_dim 128, running maximum: 605, 685 and 724 TFLOP/s. (Without ping-pong the model's warpgroups fall into step by themselves.)"""
    none, pingpong, both = (time_us("fa3", overlap=o) for o in ("none", "pingpong", "both"))
    assert none > pingpong > 1.02 * both


def test_a_stale_reference_pays_where_the_softmax_is_on_the_path() -> None:
    assert time_us("fa3", tile_kv=128) > 1.04 * time_us("fa3", tile_kv=128, reference="stale")
    heads = Problem(1, 16384, 16384, 8, 8)
    assert time_us("fa3", heads, head_dim=256) < 1.02 * time_us("fa3", heads, head_dim=256, reference="stale")


def test_one_slot_leaves_the_load_in_sight() -> None:
    one, two, three = (time_us("fa3", tile_kv=96, stages=n, overlap="within") for n in (1, 2, 3))
    assert one > 1.1 * two and two < 1.02 * three


def test_tiles_on_demand_pay_under_a_causal_mask() -> None:
    changes: dict[str, object] = {"mask": "causal", "tile_kv": 128, "reference": "stale"}
    assert time_us("fa3", **changes, parallelism="persistent_static") > 1.05 * time_us("fa3", **changes)


def test_a_cta_a_head_idles_where_heads_are_few() -> None:
    assert time_us("fa1") > 5 * time_us("fa1", Problem(16, 1024, 16384, 16, 16)) * 1.1 / 5
    few, many = Problem(1, 2048, 2048, 16, 16), Problem(8, 2048, 2048, 16, 16)
    assert time_us("fa1", many) < 1.3 * time_us("fa1", few), "eight times the work on SMs that had none"


def test_short_sequences_pay_for_every_tile() -> None:
    """The same products, in tiles of 4 blocks and of 128."""
    short, long = (time_us("fa3", Problem(16384 // n, n, n, 16, 16), tile_kv=128) * (16384 / n) for n in (512, 16384))
    assert short > 1.2 * long


def test_fused_tiles_pay_where_tiles_are_short() -> None:
    changes: dict[str, object] = {
        "head_dim": 64,
        "tile_q": 128,
        "consumers": 2,
        "stages": 4,
        "overlap": "within",
        "reference": "stale",
    }
    short = Problem(32, 512, 512, 32, 32)
    assert time_us("fa3", short, **changes) > 1.03 * time_us("fa3", short, **changes, fuse_tiles=True)


def test_power_sets_the_clock() -> None:
    busy = predict_time(planned("fa3", tile_kv=128, reference="stale"), LONG)
    idle = predict_time(planned("fa2"), LONG)
    assert busy.clock_mhz < 1.05 * model.POWER_CLOCK_MHZ and idle.clock_mhz == model.MAX_CLOCK_MHZ


def test_no_prediction_beats_the_roofline() -> None:
    """Its floors are at the data sheet's clock; a burst's may be higher."""
    for name in ("standard", "fa1", "fa2", "fa3", "fa3_fp8"):
        found = predict_time(planned(name), LONG)
        assert found.time_us > found.cost.bound_us * H200.clock_mhz / model.MAX_CLOCK_MHZ


# against measurements --------------------------------------------------------------------------------------------------------------


def results(name: str) -> BenchResult:
    return BenchResult.from_json((RESULTS / f"{name}.json").read_text())


def test_the_order_of_what_was_measured() -> None:
    """Most of what is published: every generation, both masks, three head_dims, six lengths (`fagen model --from-results` takes all)."""
    ladder = results("ladder")
    published = [results("paper_grid"), replace(ladder, cases=ladder.cases[::3]), results("chains")]
    found = [compare(r, known_schedules().get) for r in published]
    rows, missing = [r for rows, _ in found for r in rows], [m for _, missing in found for m in missing]
    report = judged(rows, date="", gpu="", driver="", compiler="", source="")
    assert len(rows) >= 60
    assert all(m.startswith("fa3_fp8 on ") for m in missing) and len(missing) <= 3, "the ladder has fa3_fp8 with other registers"
    assert report.spearman > 0.97 and report.typical_error < 0.07 and 0.93 < report.median_ratio < 1.07
    assert all(g.spearman is None or g.spearman >= 0.85 for g in report.groups)
    assert len(report.outliers) <= 3


@pytest.mark.parametrize(
    ("length", "mask", "faster", "slower"),
    [
        # benchmarks/NOTES.md, "Short lengths": head_dim 64, TFLOP/s
        (512, "full", {"tile_kv": 96, "fuse_tiles": True}, {"tile_kv": 96}),  # 398, 369
        (512, "full", {"tile_q": 128, "consumers": 2, "fuse_tiles": True}, {"tile_kv": 96, "fuse_tiles": True}),  # 435, 398
        (512, "causal", {"tile_q": 128, "consumers": 2, "fuse_tiles": True}, {"tile_kv": 96, "fuse_tiles": True}),  # 291, 230
        (1024, "full", {"tile_kv": 96, "fuse_tiles": True}, {"tile_kv": 96}),  # 482, 461
        (1024, "causal", {"tile_q": 128, "consumers": 2, "fuse_tiles": True}, {"tile_kv": 96, "fuse_tiles": True}),  # 388, 320
    ],
)
def test_short_lengths_rank_as_noted(length: int, mask: str, faster: dict[str, Any], slower: dict[str, Any]) -> None:
    problem = Problem(16384 // length, length, length, 32, 32)
    common: dict[str, Any] = {"head_dim": 64, "mask": mask, "stages": 4, "overlap": "within", "reference": "stale"}
    assert time_us("fa3", problem, **common, **faster) < time_us("fa3", problem, **common, **slower)


# the report -----------------------------------------------------------------------------------------------------------------------


def test_spearman() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1.0)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 2, 3, 4, 5], [5, 6, 7, 8, 7]) == pytest.approx(0.8207826816681233)  # scipy.stats.spearmanr
    assert spearman([1, 1, 1], [1, 2, 3]) == 0.0


def test_the_set_is_large_diverse_and_legal() -> None:
    entries = model_set.entries()
    for e in entries:
        check(e.attention, e.schedule)
    assert len({e.schedule for e in entries}) >= 40 and len({(e.attention, e.schedule, e.problem) for e in entries}) == len(entries)
    assert {e.attention.head_dim for e in entries} == {64, 128, 256} and {e.attention.mask for e in entries} == {"full", "causal"}
    assert {e.schedule.overlap for e in entries} == {"none", "within", "pingpong", "both"}
    assert {e.schedule.reference for e in entries} == {"running", "stale"} and {e.schedule.mma for e in entries} == {
        "mma_sync",
        "wgmma",
    }
    assert max(predict_time(assemble(e.attention, e.schedule), e.problem).time_us for e in entries) < 30_000, (
        "a round takes seconds"
    )


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.run(["model", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_on_what_was_measured_before(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "model.json"
    code, out, _ = run(capsys, "--from-results", str(RESULTS / "chains.json"), "--output", str(target))
    assert code == 0 and "rank correlation (Spearman, of rates) 0.9" in out and "outliers: " in out
    report = json.loads(target.read_text())
    assert report["spearman"] > 0.9 and len(report["rows"]) == 12 and report["source"] == "chains.json"


def test_a_plan_that_quantises_costs_its_streams_beside_the_attention() -> None:
    problem = Problem(4, 4096, 4096, 16, 16)
    e4m3 = load("fa3_fp8")
    quantised = load("fa3_fp8", dtype="bf16", precision="e4m3")
    alone = predict_time(assemble(e4m3.attention, e4m3.schedule), problem)
    found = predict_time(assemble(quantised.attention, quantised.schedule), problem)
    assert len(found.kernels_us) == len(found.cost.kernels) > 1
    streams = sum(found.kernels_us[:-1])
    assert found.kernels_us[-1] == pytest.approx(alone.time_us, rel=0.05)
    tensors = 3 * 4 * 4096 * 16 * 128
    once = tensors * (2 + 2 + 1) / H200.hbm_bytes_per_second * 1e6  # read twice, written in 8 bits
    assert once < streams < 1.5 * once + 4 * H200.launch_us


def test_the_command_times_its_set(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that is made up: every time is twice the predicted one, but one schedule is wrong."""
    from fagen.cli import model as command
    from fagen.explore import bench_lab

    some = model_set.entries()[30:33]
    old = results("chains")

    def bench(spec: Any, on_function: Any = None) -> BenchResult:
        cases = []
        for case in spec.cases:
            rows = []
            for ref in case.kernels:
                e = next(e for e in some if command._name(e) == ref.file)
                us = 2 * predict_time(assemble(e.attention, e.schedule), e.problem).time_us
                row = next(r for r in old.cases[0].rows if r.kind == "schedule" and r.burst)
                assert row.burst is not None
                burst = replace(row.burst, ms=replace(row.burst.ms, median=us / 1e3))
                wrong = e is some[0]
                rows.append(
                    replace(
                        row, function=ref.label, about=ref.about, schedule_id=e.schedule.id, burst=None if wrong else burst,
                        outcome="wrong" if wrong else "timed", reason="error 3 > 1" if wrong else "",
                    )
                )  # fmt: skip
            cases.append(replace(old.cases[0], attention=case.attention, problem=case.problem, rows=tuple(rows)))
        return replace(old, cases=tuple(cases))

    monkeypatch.setattr(model_set, "entries", lambda: some)
    monkeypatch.setattr(bench_watch, "run_watched", bench)
    monkeypatch.setattr(bench_lab, "check_device", lambda: None)
    code, out, _ = run(capsys, "--build-only", str(tmp_path))
    assert code == 0 and "3 kernels compiled into" in out
    code, out, _ = run(capsys, "--from", str(tmp_path), "--json")
    report = json.loads(out)
    assert code == 1 and report["median_ratio"] == pytest.approx(0.5) and report["spearman"] == pytest.approx(1.0)
    assert len(report["rows"]) == 2 and "wrong: error 3 > 1" in report["failures"][0]
    assert all(len(r["code_sha256"]) == 64 for r in report["rows"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--build-only", "x", "--from", "y"), "--from-results: --from-results, --build-only and --from exclude one another"),
        (("--from-results", "x.json", "--jobs", "2"), "--jobs: given beside --from-results, which measures nothing"),
        (("--output", "/nowhere/x.json"), "--output: /nowhere/x.json cannot be written"),
        (("--from-results", "/nowhere.json"), "/nowhere.json"),
    ],
)
def test_mistakes_on_the_command_line(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == "" and message in err


def test_no_gpu_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import fagen
    from fagen import LaunchError

    def absent() -> Any:
        raise LaunchError("no GPU: the CUDA driver sees no device")

    monkeypatch.setattr(fagen.driver, "api", absent)
    assert run(capsys) == (1, "", "fagen: no GPU: the CUDA driver sees no device\n")
