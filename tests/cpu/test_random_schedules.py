"""Random schedules: 300 legal ones planned, proven and simulated against float64; twelve compiled; illegal ones raise coded errors."""

from __future__ import annotations

import random

import pytest
from random_schedules import damaged_pair, largest_tile, legal_pair

from fagen import Attention, Schedule, ScheduleError, sass
from fagen.compile import build
from fagen.emit import emit
from fagen.oracle import check, make_inputs, simulate
from fagen.oracle.inputs import transpose_v
from fagen.plan import Problem, assemble, plan
from fagen.target import TARGETS

CHUNKS, IN_A_CHUNK = 15, 20
ILLEGAL_CHUNKS, ILLEGAL_IN_A_CHUNK = 4, 500
COMPILED = 12


def pair_of(chunk: int, number: int) -> tuple[tuple[Attention, Schedule], random.Random]:
    """The pair of that number, the same in every run, and its source of further choices."""
    rng = random.Random(f"{chunk}/{number}")
    return legal_pair(rng), rng


def problem_for(attention: Attention, schedule: Schedule, rng: random.Random) -> Problem:
    """A tiny one around the tiles' edges, with grouped heads now and then."""
    hkv = rng.choice((1, 1, 2))
    hq = hkv * rng.choice((1, 1, 2))
    sq = rng.choice((1, schedule.tile_q - 1, schedule.tile_q, schedule.tile_q + 1, rng.randint(1, 2 * schedule.tile_q)))
    ring = max(schedule.stages_k, schedule.stages_v)
    blocks = rng.choice((0, 1, 1, 2, ring, ring + 1))
    sk = max(0, blocks * schedule.tile_kv + rng.choice((-1, 0, 1)))
    return Problem(1, sq, min(sk, 640), hq, hkv)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_random_legal_schedule_computes_attention(chunk: int) -> None:
    for number in range(IN_A_CHUNK):
        (attention, schedule), rng = pair_of(chunk, number)
        problem = problem_for(attention, schedule, rng)
        q, k, v = make_inputs(attention, problem, seed=number, inputs=rng.choice(("normal", "normal", "growing")))
        p = plan(attention, schedule)  # proven
        given = transpose_v(v) if schedule.v_transposed else v
        out, lse = simulate(attention, schedule, q, k, given, seed=number, plan=p, num_sms=rng.randint(1, 3))
        verdict = check(attention, q, k, v, out, lse)
        assert verdict.passed, f"{attention}\n{schedule}\n{problem}: {verdict.reason}"


def test_the_random_schedules_differ_and_so_does_their_code() -> None:
    """Among the 300: one program text, one meaning. Two pairs with the same code differ only in what stands for the same thing."""

    def meaning(attention: Attention, schedule: Schedule) -> tuple[object, ...]:
        p = assemble(attention, schedule)
        registers = tuple(r.registers for r in p.kernels[0].roles)
        plain = schedule.replace(registers=None, stages=(schedule.stages_k, schedule.stages_v))
        return attention.replace(out_dtype=attention.output_dtype, scale=attention.softmax_scale), plain, registers

    pairs = {pair_of(c, n)[0] for c in range(CHUNKS) for n in range(IN_A_CHUNK)}
    assert len(pairs) > 0.95 * CHUNKS * IN_A_CHUNK
    by_code: dict[tuple[str, str], set[tuple[object, ...]]] = {}
    for attention, schedule in pairs:
        code = emit(assemble(attention, schedule)).code_sha256
        by_code.setdefault((schedule.arch, code), set()).add(meaning(attention, schedule))
    assert all(len(meanings) == 1 for meanings in by_code.values()), [m for m in by_code.values() if len(m) > 1]
    covered = {(s.mma, s.roles, s.overlap, s.parallelism, a.mask) for a, s in pairs}
    assert len(covered) >= 36


@pytest.mark.skipif(sass.nvdisasm() is None, reason=f"no nvdisasm: {sass.INSTALL}")
@pytest.mark.parametrize("number", range(COMPILED))
def test_a_random_legal_schedule_compiles_to_its_program(number: int) -> None:
    """No spill, exact counts. Every second one has the largest legal tile: where registers run out first."""
    rng = random.Random(f"compiled {number}")
    attention, schedule = legal_pair(rng) if number % 2 else largest_tile(legal_pair(rng))
    p = plan(attention, schedule)
    report = build(p, emit(p), enforce=False).report
    assert not report.broken(), f"{attention}\n{schedule}\n" + "\n".join(report.broken())
    assert not report.kernels[0].differing
    threads = p.kernels[0].threads
    assert report.kernels[0].registers * threads <= TARGETS[schedule.arch].registers_per_sm


@pytest.mark.parametrize("chunk", range(ILLEGAL_CHUNKS))
def test_a_random_illegal_schedule_is_refused_with_codes(chunk: int) -> None:
    """Whatever stands in the fields: a plan, or a ScheduleError that names fields of the values."""
    fields = {*Attention.field_names(), *Schedule.field_names()}
    refused = 0
    for number in range(ILLEGAL_IN_A_CHUNK):
        attention, schedule = damaged_pair(random.Random(f"illegal {chunk}/{number}"))
        try:
            assemble(attention, schedule)
        except ScheduleError as e:
            refused += 1
            assert e.violations and all(v.code and v.message and v.field in fields for v in e.violations), str(e)
            assert len({(v.code, v.field, v.message) for v in e.violations}) == len(e.violations)
    assert refused > 0.8 * ILLEGAL_IN_A_CHUNK
