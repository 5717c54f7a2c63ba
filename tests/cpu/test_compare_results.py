"""bench --compare: every function's ratio with its interval, noise said aloud, and an exit code for a gate."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from results import result_of, row, spread

from fagen import InputError
from fagen.cli import run
from fagen.explore.bench_result import BenchResult
from fagen.explore.compare_results import compare_results
from fagen.library import load
from fagen.plan import Problem, plan

LONG, SHORT = Problem(1, 16384, 16384, 16, 16), Problem(4, 4096, 4096, 16, 16)


def result(fa3: float, fa2: float, peer: float = 3.1, problem: Problem = LONG, noise: float = 0.004) -> BenchResult:
    """fa3, fa2 and a peer in one case: milliseconds."""
    found = result_of({name: (plan(*load(name)), problem, spread(ms, noise)) for name, ms in (("fa3", fa3), ("fa2", fa2))})
    (case,) = found.cases
    theirs = row("cudnn (torch)", None, case.attention, problem, spread(peer, noise), "peer")
    return replace(found, cases=(replace(case, rows=(*case.rows, theirs)),))


def test_ratios_are_of_speed_and_their_interval_is_that_of_two_medians() -> None:
    found = compare_results(result(3.0, 6.0), result(2.5, 6.012))
    fa3, fa2, peer = found.rows
    assert fa3.ratio.median == pytest.approx(1.2) and fa3.function == "fa3" and not fa3.within_noise
    assert fa3.ratio.low == pytest.approx(fa3.new.low / fa3.old.high) and fa3.ratio.high == pytest.approx(
        fa3.new.high / fa3.old.low
    )
    assert fa3.ratio.low < 1.2 < fa3.ratio.high and 0.9 < fa3.ratio.confidence < 1
    assert fa2.ratio.median == pytest.approx(1 / 1.002) and fa2.within_noise
    assert peer.kind == "peer" and peer.ratio.median == pytest.approx(1)
    assert found.mean("schedule") == pytest.approx((1.2 / 1.002) ** 0.5) and found.mean("peer") == pytest.approx(1)
    plain = found.to_dict()
    assert json.loads(json.dumps(plain)) == plain


def test_only_schedules_fail_and_only_past_the_noise() -> None:
    found = compare_results(result(3.0, 6.0, 3.0), result(3.3, 6.03, 4.0))
    assert [r.function for r in found.slower(0.95)] == ["fa3"], "the peer lost more, fa2 within noise"
    assert found.slower(0.9) == ()
    wide = compare_results(result(3.0, 6.0, noise=0.2), result(3.3, 6.0, noise=0.2))
    assert wide.rows[0].ratio.median < 0.95 and wide.slower(0.95) == ()


def test_what_one_run_alone_has_is_said() -> None:
    old, new = result(3.0, 6.0), result(3.0, 6.0, problem=SHORT)
    with pytest.raises(
        InputError, match=r"--compare: the files have no case in common: fa3 on hd128 bf16 full 1,16,16,16384,16384"
    ):
        compare_results(old, new)
    both = replace(new, cases=(*old.cases, *new.cases))
    found = compare_results(old, both)
    assert found.only_old == () and "fa3 on hd128 bf16 full 4,16,16,4096,4096" in found.only_new


def test_another_plan_under_the_same_name_is_marked() -> None:
    old = result(3.0, 6.0)
    (case,) = old.cases
    rows = (replace(case.rows[0], plan_id="0-1"), *case.rows[1:])
    found = compare_results(old, replace(old, cases=(replace(case, rows=rows),)))
    assert [r.changed for r in found.rows] == [True, False, False]


def test_sustained_is_compared_with_sustained() -> None:
    old = result(3.0, 6.0)
    (case,) = old.cases
    rows = (replace(case.rows[0], sustained=case.rows[0].burst), *case.rows[1:])
    both = replace(old, cases=(replace(case, rows=rows),))
    found = compare_results(both, old)
    assert [r.load for r in found.rows] == ["burst"] * 3 and found.only_old == (
        "fa3 on hd128 bf16 full 1,16,16,16384,16384, sustained",
    )
    assert [r.load for r in compare_results(both, both).rows] == ["burst", "sustained", "burst", "burst"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(result(3.0, 6.0).to_json())
    new.write_text(result(3.3, 6.0).to_json())
    assert run(["bench", "--compare", str(old), str(new)]) == 0
    text = capsys.readouterr().out
    assert "0.909" in text and "within noise" in text and "geometric mean of the schedules: 0.953" in text
    assert run(["bench", "--compare", str(old), str(new), "--fail-below", "0.95"]) == 1
    assert "slower than 0.95: fa3 on hd128 bf16 full 1,16,16,16384,16384: 0.909" in capsys.readouterr().out
    assert run(["bench", "--compare", str(old), str(new), "--fail-below", "0.9"]) == 0
    assert "no schedule is below 0.9 of what it was" in capsys.readouterr().out
    assert run(["bench", "--compare", str(old), str(new), "--fail-below", "0.95", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["slower"] == ["fa3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fa3", "--compare", "a", "b"], "SCHEDULE: given beside --compare"),
        (["--compare", "a", "b", "--output", "c"], "--output: given beside --compare"),
        (["--compare", "a", "b", "--full"], "--causal/--full: given beside --compare"),
        (["--compare", "a", "b", "--rounds", "10"], "--rounds: given beside --compare"),
        (["--compare", "a", "b", "--fail-below", "0"], "--fail-below: 0; a positive part"),
        (["--compare", "/nowhere.json", "b"], "--compare: /nowhere.json cannot be read"),
        (["fa3", "--fail-below", "0.9"], "--fail-below: is about --compare"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err
