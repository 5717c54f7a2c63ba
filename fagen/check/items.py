"""What is checked: kernels with their cases, and the results."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from .. import evidence
from ..attention import Attention
from ..errors import InputError
from ..oracle import CheckProblem, Verdict, check_problems
from ..schedule import Schedule


@dataclass(frozen=True)
class Item:
    """One kernel and the problems to check it on. `name` is that of its files and of its lines in reports."""

    name: str
    attention: Attention
    schedule: Schedule
    problems: tuple[CheckProblem, ...]


@dataclass(frozen=True)
class CaseResult:
    """One problem's outcome. `seed` makes its inputs; `runs`: launches (or interleavings) that had to agree to the last bit."""

    item: str
    problem: CheckProblem
    mask: str
    seed: int
    verdict: Verdict
    runs: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, as in the evidence, with the seed."""
        return {**evidence.case(self.problem, self.mask, self.verdict), "seed": self.seed, "runs": self.runs}


def parse_shape(text: str) -> CheckProblem:
    """ "B,HQ,HKV,SQ,SK" as a problem; InputError naming --shape."""
    parts = text.split(",")
    try:
        batch, hq, hkv, sq, sk = (int(p) for p in parts)
    except ValueError:
        raise InputError("--shape", f"{text!r} is not B,HQ,HKV,SQ,SK: five whole numbers such as 2,8,2,512,512") from None
    if min(batch, hq, hkv, sq, sk) < 0:
        raise InputError("--shape", f"{text!r} has a negative size")
    if max(batch, hq, hkv, sq, sk) >= 1 << 30:
        raise InputError("--shape", f"{text!r} has a size outside 0 … 2^30 − 1")
    if hq % max(hkv, 1) or hq and not hkv:
        legal = [n for n in range(1, hq + 1) if hq % n == 0]
        near = sorted(sorted(legal, key=lambda n: abs(n - hkv))[:3])
        raise InputError("--shape", f"{text!r}: {hq} query heads are not a multiple of {hkv} KV heads (nearest legal: {near})")
    return CheckProblem(batch, sq, sk, hq, hkv)


def jitter_problems(attention: Attention, schedule: Schedule) -> tuple[CheckProblem, ...]:
    """Few problems that show most of what timing can break: several tiles a CTA, rings that wrap, ragged edges, a lone tile."""
    tq, tk = schedule.tile_q, schedule.tile_kv
    stages = max(schedule.stages_k, schedule.stages_v)
    wanted = {(2 * tq + 1, (2 * stages + 1) * tk + 1), (tq, tk)}
    several = [p for p in check_problems(attention, schedule) if p.batch * p.hq >= 132 and p.sq > tq]
    return (*(CheckProblem(1, sq, sk, 4, 2) for sq, sk in sorted(wanted)), *several[:1], CheckProblem(2, 1, tk + 1, 8, 1))


def with_reason(verdict: Verdict, reason: str) -> Verdict:
    """The verdict, failed for one more reason; as it is where there is none."""
    if not reason:
        return verdict
    return dataclasses.replace(verdict, passed=False, reason="; ".join(r for r in (reason, verdict.reason) if r))
