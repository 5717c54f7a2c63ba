"""Divisions by numbers that the host knows: exact for every numerator a kernel has, and every tile decoded to another place."""

from __future__ import annotations

import random

import pytest

import fagen
from fagen.errors import InternalError
from fagen.plan import Problem
from fagen.plan.expr import Expr, Op, division, sym, where
from fagen.plan.steps import Let, walk

LAST = 2**31 - 1
DIVISORS = (
    1,
    2,
    3,
    5,
    6,
    7,
    10,
    12,
    16,
    31,
    100,
    127,
    128,
    641,
    2**16 - 1,
    2**16,
    2**16 + 1,
    2**30 - 1,
    2**30,
    2**30 + 1,
    LAST - 1,
    LAST,
)


@pytest.mark.parametrize("divisor", DIVISORS)
def test_a_division_is_exact_up_to_the_largest_int(divisor: int) -> None:
    multiplier, shift = division(divisor)
    assert 0 <= multiplier < 2**32 and 31 <= shift < 64  # what the kernel's members and a shift of 64 bits hold
    rng = random.Random(divisor)
    multiples = [divisor * rng.randint(0, LAST // divisor) for _ in range(300)]
    near = [n + d for n in (*multiples, 0, LAST - LAST % divisor) for d in (-1, 0, 1)]
    for n in (0, 1, LAST, *(x for x in near if 0 <= x <= LAST), *(rng.randint(0, LAST) for _ in range(300))):
        assert n * multiplier >> shift == n // divisor
        assert n * multiplier < 2**64


@pytest.mark.parametrize("divisor", [0, -1, 2**31])
def test_what_has_no_multiplier_is_our_fault(divisor: int) -> None:
    with pytest.raises(InternalError, match=f"divisor {divisor};"):
        division(divisor)


def test_c_divides_by_what_the_host_knows_and_by_a_choice_of_two_of_it() -> None:
    n, a, b, c = (sym(x) for x in "nabc")
    known = {a: "p.by_a", b: "p.by_b"}
    assert (n // a + 1).c(divisors=known) == "quotient(n, p.by_a) + 1"
    assert ((n - 1) // where(c < 2, a, b)).c(divisors=known) == "quotient(n - 1, c < 2 ? p.by_a : p.by_b)"
    assert (n // c).c(divisors=known) == "n / c"
    assert (n // where(c < 2, a, c)).c(divisors=known) == "n / (c < 2 ? a : c)"
    assert where(1, a, b) == a and where(0, a, b) == b
    assert (n // where(c < 2, a, b)).eval({"n": 17, "a": 3, "b": 5, "c": 1}) == 5


def runtime_divisions(e: Expr) -> set[Expr]:
    """What is divided by in an expression, but for constants."""
    if not isinstance(e, Op):
        return set()
    inner = set().union(*(runtime_divisions(a) for a in e.args))
    return inner | ({e.args[1]} if e.op == "/" and e.args[1].symbols() else set())


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("parallelism", ["persistent_static", "persistent_dynamic"])
def test_persistent_kernels_divide_by_nothing_else_and_decode_every_tile_once(mask: str, parallelism: str) -> None:
    attention, schedule = fagen.load("fa3", mask=mask, parallelism=parallelism)
    p = fagen.plan(attention, schedule)
    kernel = p.kernels[0]
    known = {x.value for x in kernel.params if x.ctype == "divisor"}
    lets = [s for r in kernel.roles for s in walk(r.body) if isinstance(s, Let)]
    divided = set().union(*(runtime_divisions(s.value) for s in lets))
    assert divided and all(e in known or isinstance(e, Op) and e.op == "where" and set(e.args[1:]) <= known for e in divided)
    # three sections of heads under the causal mask, of which the last is smaller
    problem = Problem(batch=3, sq=300, sk=40000, hq=6, hkv=2)
    scope = {"batch": 3, "sq": 300, "sk": 40000, "hq": 6, "hkv": 2, "num_sms": 132}
    for x in kernel.params:
        if not x.name.endswith(("_sb", "_ss", "_sh")):
            scope[x.name] = x.value.eval(scope)
    decode = {s.var: s.value for s in lets if s.var in ("section", "rest", "rank", "m", "pair", "b", "h")}
    places = set()
    for tile in range(scope["total"]):
        env = scope | {"tile": tile}
        for name, value in decode.items():
            env[name] = value.eval(env)
        places.add((env["m"], env["h"], env["b"]))
    assert places == {(m, h, b) for m in range(3) for h in range(6) for b in range(problem.batch)}
