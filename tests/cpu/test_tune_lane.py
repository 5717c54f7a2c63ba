"""The race's processes, on made-up kernels in real processes: a crash or a hang costs one, and what is found is kept (case T01)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_tuning import FA3, FULL, LONG, SHORT

from fagen.errors import LaunchError
from fagen.explore import tune_lane, tune_run
from fagen.explore.tune_result import Candidate, Measurement, Rate, Work
from fagen.plan.kernel import Problem

HERE = Path(__file__).parent


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Made-up kernels; the bundles that were written."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setattr(tune_lane, "TASK", "fake_tuning:measuring")
    bundles: list[str] = []

    def leave(failure: Any, spec: Any, case: int, function: str, root: Any) -> Path:
        bundles.append(f"{failure.kind} of {function} on {spec.cases[case].problem}")
        return Path(root) / function

    monkeypatch.setattr(tune_lane, "leave_bundle", leave)
    return bundles


def candidates(*names: str, beside: tuple[str, ...] = ()) -> tuple[Candidate, ...]:
    return tuple(Candidate(n, FA3.replace(tile_kv=16 * i + 32), beside=n in beside) for i, n in enumerate((*names, *beside)))


def race(
    work: list[Work], folder: Path, told: list[tuple[Problem, set[str]]] | None = None, peers: tuple[str, ...] = ()
) -> list[Measurement]:
    def progressed(problem: Problem, rates: Mapping[str, Rate]) -> None:
        if told is not None:
            told.append((problem, set(rates)))

    return tune_lane.race_on(
        FULL, work, peers, 14, lambda _: None, progressed, None, folder=folder, seed=0, bundles=folder / "repro", gpu=None
    )


def test_the_fastest_right_one_wins_and_what_fails_is_named(fakes: list[str], tmp_path: Path) -> None:
    some = candidates("a-1.5", "b-1.0", "c-1.2", "d-1.001", "e-0.5-wrong", "f-0.4-crash", "g-0.3-hang", beside=("t-0.99",))
    told: list[tuple[Problem, set[str]]] = []
    (found,) = race([Work(LONG, some)], tmp_path, told, ("cudnn",))
    assert found.absent == ("cudnn: absent: not installed",)
    assert found.final[0] == "b-1.0" and found.near == ("d-1.001",) and "t-0.99" in found.rates
    assert found.failed["e-0.5-wrong"].reason == "wrong: error 3 > 1" and found.failed["e-0.5-wrong"].bundle is None
    assert "signal SIGABRT" in found.failed["f-0.4-crash"].reason
    assert "no sign of life for 1 s" in found.failed["g-0.3-hang"].reason
    assert found.failed["g-0.3-hang"].bundle == str(tmp_path / "repro" / "g-0.3-hang")
    assert sorted(fakes) == [f"death of f-0.4-crash on {LONG}", f"hang of g-0.3-hang on {LONG}"]
    assert len((tmp_path / "processes.log").read_text().splitlines()) == 3, (
        "one process for each that died, and one that ended well"
    )
    assert not {"e-0.5-wrong", "f-0.4-crash", "g-0.3-hang"} & set(found.rates)
    vs = found.rates["a-1.5"].vs_winner
    assert vs is not None and vs.median == pytest.approx(1 / 1.5, rel=0.02) and found.compiler == "NVRTC 13"
    assert told and all(problem == LONG for problem, _ in told)


def test_a_death_on_the_second_problem_keeps_the_first(fakes: list[str], tmp_path: Path) -> None:
    """The kernel that faults at 4096 keys only: the driver reports it, and what is done on 512 keys is not done again."""
    short = Work(SHORT, candidates("a-1.5", "b-1.0"))
    long = Work(LONG, candidates("a-1.5", "b-1.0-fault"))
    first, second = race([short, long], tmp_path)
    assert first.final == ("b-1.0", "a-1.5") and not first.failed
    assert second.final == ("a-1.5",) and "misaligned address" in second.failed["b-1.0-fault"].reason
    log = (tmp_path / "processes.log").read_text().splitlines()
    assert log == [f"None {SHORT} {LONG}", f"None {LONG}"] and fakes == [f"fault of b-1.0-fault on {LONG}"]


def test_times_of_an_earlier_run_spare_measurements(fakes: list[str], tmp_path: Path) -> None:
    names = [f"k{i}-{1 + i / 10}" for i in range(8)]
    (found,) = race([Work(LONG, candidates(*names), {n: 1 + i / 10 for i, n in enumerate(names)})], tmp_path)
    assert found.final[0] == names[0] and found.rates[names[0]].rounds == 12
    assert found.rates[names[7]].rounds == 0 and found.rates[names[7]].ms.median == 1.7
    assert found.stages[0].measured == 0 and found.stages[0].dropped == 4


def test_a_failure_that_is_none_of_the_candidates_ends_the_run(
    fakes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_lane, "TASK", "fake_tuning:nowhere")
    with pytest.raises(LaunchError, match="the worker starts"):
        race([Work(LONG, candidates("a-1.0"))], tmp_path)


def test_problems_are_dealt_out_to_the_gpus(fakes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process for each GPU, named as CUDA_VISIBLE_DEVICES names it; results come in the order of the problems."""
    monkeypatch.setattr(tune_run.driver, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    problems = [SHORT, LONG, Problem(1, 16384, 16384, 16, 16)]
    work = [Work(p, candidates(f"a-{i + 1}.0", f"b-{i + 2}.0")) for i, p in enumerate(problems)]
    found = tune_run.Workshop(tmp_path, 1).race(FULL, work, (), 6, lambda _: None, lambda *_: None, None)
    assert [m.final[0] for m in found] == ["a-1.0", "a-2.0", "a-3.0"]
    assert sorted((tmp_path / "processes.log").read_text().splitlines()) == [f"3 {SHORT} {problems[2]}", f"5 {LONG}"]


def test_gpus_are_named_as_the_user_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert tune_run.visible_gpus(2) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    assert tune_run.visible_gpus(2) == ["GPU-a", "GPU-b"]
