"""Integer expressions over run-time values: the only arithmetic a plan does on what a call brings (lengths, heads, strides).

An `Expr` prints itself as C (`.c()`), computes itself in Python (`.eval()`), and is a frozen value that compares and hashes by
structure. Comparisons with `<` and friends build expressions (1 or 0); equality of *values* is `eq(a, b)`, since `==` compares
the expressions themselves.

Division and remainder are of non-negative numbers, where C and Python agree; `eval` refuses anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Union

from ..errors import InternalError

IntLike = Union["Expr", int]


class Expr:
    """Base class; build with `sym`, `const` and the operators."""

    __slots__ = ()

    def __add__(self, other: IntLike) -> Expr:
        return _fold("+", self, as_expr(other))

    def __radd__(self, other: int) -> Expr:
        return _fold("+", as_expr(other), self)

    def __sub__(self, other: IntLike) -> Expr:
        return _fold("-", self, as_expr(other))

    def __rsub__(self, other: int) -> Expr:
        return _fold("-", as_expr(other), self)

    def __mul__(self, other: IntLike) -> Expr:
        return _fold("*", self, as_expr(other))

    def __rmul__(self, other: int) -> Expr:
        return _fold("*", as_expr(other), self)

    def __floordiv__(self, other: IntLike) -> Expr:
        return _fold("/", self, as_expr(other))

    def __rfloordiv__(self, other: int) -> Expr:
        return _fold("/", as_expr(other), self)

    def __mod__(self, other: IntLike) -> Expr:
        return _fold("%", self, as_expr(other))

    def __and__(self, other: IntLike) -> Expr:
        return _fold("&", self, as_expr(other))

    def __or__(self, other: IntLike) -> Expr:
        return _fold("|", self, as_expr(other))

    def __xor__(self, other: IntLike) -> Expr:
        return _fold("^", self, as_expr(other))

    def __lt__(self, other: IntLike) -> Expr:
        return _fold("<", self, as_expr(other))

    def __gt__(self, other: IntLike) -> Expr:
        return _fold(">", self, as_expr(other))

    def __le__(self, other: IntLike) -> Expr:
        return _fold("<=", self, as_expr(other))

    def __ge__(self, other: IntLike) -> Expr:
        return _fold(">=", self, as_expr(other))

    def __bool__(self) -> bool:
        raise InternalError(f"an Expr has no truth value before it is evaluated: {self.c()}")

    def eval(self, env: Mapping[str, int]) -> int:
        """The value with the symbols of `env`; an unknown symbol or a negative division is an `InternalError`."""
        return _eval(self, env)

    def c(self, names: Callable[[str], str] = str, divisors: Mapping[Expr, str] | None = None) -> str:
        """C source; `names` maps a symbol to how the surrounding code spells it (`sk` to `p.sk`), `divisors` what is divided by to the
        C name of its Divisor, which the division then uses."""
        return _print(self, names, divisors or {})[0]

    def substitute(self, values: Mapping[str, IntLike]) -> Expr:
        """The same expression with some symbols replaced."""
        if isinstance(self, Sym):
            return as_expr(values[self.name]) if self.name in values else self
        if isinstance(self, Op):
            return _fold(self.op, *(a.substitute(values) for a in self.args))
        return self

    def symbols(self) -> frozenset[str]:
        """The names that `eval` needs."""
        if isinstance(self, Sym):
            return frozenset((self.name,))
        if isinstance(self, Op):
            return frozenset().union(*(a.symbols() for a in self.args))
        return frozenset()

    def __str__(self) -> str:
        return self.c()


@dataclass(frozen=True)
class Const(Expr):
    value: int


@dataclass(frozen=True)
class Sym(Expr):
    name: str


@dataclass(frozen=True)
class Op(Expr):
    op: str
    args: tuple[Expr, ...]


def sym(name: str) -> Sym:
    return Sym(name)


def as_expr(x: IntLike) -> Expr:
    return x if isinstance(x, Expr) else Const(int(x))


def minimum(*xs: IntLike) -> Expr:
    return reduce(lambda a, b: _fold("min", a, b), [as_expr(x) for x in xs])


def maximum(*xs: IntLike) -> Expr:
    return reduce(lambda a, b: _fold("max", a, b), [as_expr(x) for x in xs])


def ceildiv(a: IntLike, b: IntLike) -> Expr:
    """Quotient rounded up; prints as (a + b - 1) / b."""
    a, b = as_expr(a), as_expr(b)
    return (a + (b - 1)) // b


def eq(a: IntLike, b: IntLike) -> Expr:
    return _fold("==", as_expr(a), as_expr(b))


def where(cond: IntLike, a: IntLike, b: IntLike) -> Expr:
    """`a` where the condition is not 0, else `b`. Both are computed in Python, so both must be defined."""
    return _fold("where", as_expr(cond), as_expr(a), as_expr(b))


def division(divisor: int) -> tuple[int, int]:
    """(multiplier, shift), 32 bits each, such that n // divisor is n · multiplier >> shift for every 0 ≤ n < 2^31; of a divisor from 1
    to 2^31 − 1. Granlund and Montgomery, "Division by Invariant Integers using Multiplication", PLDI 1994, section 4."""
    if not 0 < divisor < 1 << 31:
        raise InternalError(f"no multiplier for the divisor {divisor}; it must be in 1 … 2^31 − 1")
    shift = 31 + (divisor - 1).bit_length()
    return (1 << shift) // divisor + 1, shift


def pow2floor(a: IntLike) -> Expr:
    """Largest power of two not above `a` (at least 1). Host only: it has no C form."""
    return _fold("pow2floor", as_expr(a))


_PRECEDENCE = {
    "where": 0,
    "*": 7,
    "/": 7,
    "%": 7,
    "+": 6,
    "-": 6,
    "<": 5,
    ">": 5,
    "<=": 5,
    ">=": 5,
    "==": 4,
    "&": 3,
    "^": 2,
    "|": 1,
}
_APPLY: dict[str, Callable[..., int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "<": lambda a, b: int(a < b),
    ">": lambda a, b: int(a > b),
    "<=": lambda a, b: int(a <= b),
    ">=": lambda a, b: int(a >= b),
    "==": lambda a, b: int(a == b),
    "&": lambda a, b: a & b,
    "^": lambda a, b: a ^ b,
    "|": lambda a, b: a | b,
    "where": lambda c, a, b: a if c else b,
    "min": min,
    "max": max,
    "pow2floor": lambda a: 1 << (max(a, 1).bit_length() - 1),
}


def _fold(op: str, *args: Expr) -> Expr:
    """Constants fold and neutral elements vanish, so that the printed C holds nothing a person would not write."""
    if all(isinstance(a, Const) for a in args):
        return Const(_apply(op, [a.value for a in args if isinstance(a, Const)]))
    if op == "where" and isinstance(args[0], Const):
        return args[1] if args[0].value else args[2]
    if len(args) == 2:
        a, b = args
        if op in "+-" and b == Const(0) or op in ("*", "/") and b == Const(1):
            return a
        if op == "+" and a == Const(0) or op == "*" and a == Const(1):
            return b
        if op == "*" and Const(0) in args or op == "%" and b == Const(1):
            return Const(0)
        if op in ("min", "max") and a == b:
            return a
        if op in "+-" and isinstance(b, Const) and isinstance(a, Op) and a.op in "+-" and isinstance(a.args[1], Const):
            left = a.args[1].value if a.op == "+" else -a.args[1].value  # (x + 3) - 1 is x + 2
            total = left + (b.value if op == "+" else -b.value)
            return a.args[0] + total if total >= 0 else a.args[0] - (-total)
    return Op(op, tuple(args))


def _apply(op: str, values: list[int]) -> int:
    if op in ("/", "%") and (values[0] < 0 or values[1] <= 0):
        raise InternalError(f"division outside the non-negative range: {values[0]} {op} {values[1]}")
    return _APPLY[op](*values)


def _eval(e: Expr, env: Mapping[str, int]) -> int:
    if isinstance(e, Const):
        return e.value
    if isinstance(e, Sym):
        try:
            return int(env[e.name])
        except KeyError:
            raise InternalError(f"no value for symbol {e.name!r}; known: {', '.join(sorted(env))}") from None
    assert isinstance(e, Op)
    return _apply(e.op, [_eval(a, env) for a in e.args])


def _print(e: Expr, names: Callable[[str], str], divisors: Mapping[Expr, str]) -> tuple[str, int]:
    """C text and the precedence of its outermost operator (9: never needs parentheses)."""
    if isinstance(e, Const):
        return str(e.value), 9 if e.value >= 0 else 6
    if isinstance(e, Sym):
        return names(e.name), 9
    assert isinstance(e, Op)
    parts = [_print(a, names, divisors) for a in e.args]
    if e.op in ("min", "max"):
        return f"{e.op}({', '.join(text for text, _ in parts)})", 9
    if e.op not in _PRECEDENCE:
        raise InternalError(f"{e.op} is computed on the host and has no C form")
    mine = _PRECEDENCE[e.op]
    if e.op == "where":
        cond, a, b = (text if p > mine else f"({text})" for text, p in parts)
        return f"{cond} ? {a} : {b}", mine
    (left, pl), (right, pr) = parts
    known = _divisor(e.args[1], names, divisors) if e.op == "/" else None
    if known:
        return f"quotient({left}, {known})", 9
    left = left if pl >= mine else f"({left})"
    right = right if pr > mine else f"({right})"
    return f"{left} {e.op} {right}", mine


def _divisor(e: Expr, names: Callable[[str], str], divisors: Mapping[Expr, str]) -> str | None:
    """The C name of a known divisor, or the choice between two."""
    if isinstance(e, Op) and e.op == "where":
        a, b = (divisors.get(x) for x in e.args[1:])
        return f"{_print(e.args[0], names, divisors)[0]} ? {a} : {b}" if a and b else None
    return divisors.get(e)
