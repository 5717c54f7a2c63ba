"""Checking on the CPU: the simulator runs the plan's program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import as_completed

from ..oracle import CheckProblem
from ..schedule import Schedule
from .items import CaseResult, Item
from .judge import judge_simulated, pool, room_for

MOST_TILES = 400
"""Tiles (query tile × key block) above which only some CTAs of a problem are simulated: 0.3 to 2 ms each."""
SAMPLED_CTAS = 8


def tiles_of(problem: CheckProblem, schedule: Schedule) -> int:
    """(query tile, key block) pairs of a problem: what the simulator's time goes with."""
    per_head = -(-problem.sq // schedule.tile_q) * max(1, -(-problem.sk // schedule.tile_kv))
    return problem.batch * problem.hq * per_head


def check_cpu(
    items: Sequence[Item], *, seed: int = 0, repeat: int = 1, on_result: Callable[[CaseResult], None] = lambda _: None
) -> list[CaseResult]:
    """Simulate every problem of every item and judge it, problem i with the inputs of `seed` + i; results in the items' order.

    `repeat`: interleavings that must give the same bits. Large problems are sampled (some CTAs, in one interleaving).
    """
    found: dict[tuple[int, int], CaseResult] = {}
    with pool(sum(len(i.problems) for i in items), room_for(items)) as judges:
        waiting = {}
        for n, item in enumerate(items):
            for i, problem in enumerate(item.problems):
                ctas = SAMPLED_CTAS if tiles_of(problem, item.schedule) > MOST_TILES else None
                runs = repeat if ctas is None else 1
                future = judges.submit(judge_simulated, item.attention, item.schedule, problem, seed + i, runs, ctas)
                waiting[future] = (n, i, runs)
        for future in as_completed(waiting):
            n, i, runs = waiting[future]
            item = items[n]
            result = CaseResult(item.name, item.problems[i], item.attention.mask, seed + i, future.result(), runs)
            found[n, i] = result
            on_result(result)
    return [found[key] for key in sorted(found)]
