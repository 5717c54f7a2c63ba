"""Successive halving without a GPU: who is measured how often, what noise does, what an earlier run spares."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from fagen.explore.tune_race import FIRST_ROUNDS, Race


class Machine:
    """Times by name, with noise of their own and a drift that all of a round share."""

    def __init__(self, ms: Mapping[str, float], noise: float = 0.002, seed: int = 0):
        self.ms, self.noise, self.rng = ms, noise, random.Random(seed)
        self.asked: list[tuple[tuple[str, ...], int]] = []

    def __call__(self, names: Sequence[str], rounds: int) -> dict[str, list[float]]:
        self.asked.append((tuple(names), rounds))
        drift = [1 + 0.1 * self.rng.random() for _ in range(rounds)]
        return {n: [self.ms[n] * d * (1 + self.rng.gauss(0, self.noise)) for d in drift] for n in names}


SPREAD = {f"k{i:02d}": 1.0 + 0.05 * i for i in range(16)}


def test_rounds_double_and_halves_drop_out() -> None:
    machine = Machine(SPREAD)
    race = Race(tuple(SPREAD), rounds=14)
    race.run(machine)
    assert [(len(names), rounds) for names, rounds in machine.asked] == [(16, 2), (8, 4), (4, 8)]
    assert race.left[0] == "k00" and not race.stopped
    assert [len(r.dropped) for r in race.rungs] == [8, 4, 0] and not any(r.within_noise for r in race.rungs)
    assert len(race.own("k00")) == 14 and len(race.own("k15")) == FIRST_ROUNDS


def test_a_drift_that_all_share_does_not_hide_a_difference() -> None:
    """Rounds differ by 10 %, the candidates by 2 %: paired by rounds they are told apart, and the wide intervals of each do not matter."""
    race = Race(("fast", "slow"), rounds=14)
    race.run(Machine({"fast": 1.0, "slow": 1.02}))
    assert race.left == ("fast", "slow") and not race.near("slow", "fast")
    ratio = race.ratio("slow", "fast")
    assert ratio is not None and 1.015 < ratio.low <= ratio.median <= ratio.high < 1.025


@pytest.mark.parametrize("seed", range(5))
def test_what_is_within_noise_of_the_last_one_kept_stays(seed: int) -> None:
    """Twins cannot be told apart: none of them may drop out by luck in the first rung, and it is said that they stayed for that."""
    twins = {f"twin{i}": 1.0 for i in range(8)} | {f"slow{i}": 1.2 for i in range(8)}
    race = Race(tuple(twins), rounds=14)
    race.run(Machine(twins, seed=seed))
    assert set(race.rungs[0].dropped) == {f"slow{i}" for i in range(8)}
    wide = Race(tuple(SPREAD), rounds=14)
    wide.run(Machine(dict.fromkeys(SPREAD, 1.0), noise=0.01, seed=seed))
    assert wide.rungs[0].within_noise and len(wide.rungs[0].dropped) < 8


def test_a_few_are_never_halved_and_few_rounds_are_one_rung() -> None:
    machine = Machine({"a": 1.0, "b": 2.0, "c": 3.0})
    Race(("a", "b", "c"), rounds=14).run(machine)
    assert [len(names) for names, _ in machine.asked] == [3, 3, 3]
    machine = Machine(SPREAD)
    race = Race(tuple(SPREAD), rounds=1)
    race.run(machine)
    assert [rounds for _, rounds in machine.asked] == [1] and len(race.left) == 16


def test_guests_are_measured_beside_the_last_ones_only() -> None:
    machine = Machine(SPREAD | {"peer": 2.0})
    race = Race(tuple(SPREAD), rounds=14, guests=("peer",))
    race.run(machine)
    assert ["peer" in names for names, _ in machine.asked] == [False, False, True]
    ratio = race.ratio("peer", race.left[0])
    assert "peer" not in race.left and ratio is not None and ratio.median == pytest.approx(2.0, rel=0.02)


def test_a_race_out_of_time_says_what_it_knows() -> None:
    machine = Machine(SPREAD)
    race = Race(tuple(SPREAD), rounds=14)
    race.run(machine, expired=lambda: True)
    assert race.stopped and len(machine.asked) == 1 and race.left[0] == "k00" and len(race.left) == 8


def test_stored_times_spare_the_first_rung() -> None:
    machine = Machine(SPREAD)
    race = Race(tuple(SPREAD), rounds=14, stored={n: t for n, t in SPREAD.items() if n != "k03"})
    race.run(machine)
    assert machine.asked[0] == (("k03",), 2), "only what is not known is measured at first"
    assert race.left[0] == "k00" and race.own("k15") == [] and race.median("k15") == SPREAD["k15"]
    assert len(machine.asked[1][0]) < 16 and "k00" in machine.asked[1][0]


def test_a_stored_time_does_not_decide_a_near_race() -> None:
    """Different runs differ by a few percent: what was stored 2 % slower than the last one kept is measured."""
    ms = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0, "e": 1.0}
    race = Race(tuple(ms), rounds=14, stored={"d": 1.02, "e": 1.3})
    race.run(Machine(ms))
    assert race.own("d") and not race.own("e") and race.rungs[0].dropped == ("e",)


def test_nothing_to_race_is_no_rung() -> None:
    race = Race((), rounds=14)
    race.run(lambda names, rounds: pytest.fail("nothing to measure"))
    assert race.rungs == [] and race.left == ()
