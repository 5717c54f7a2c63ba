"""Which marks follow one another without a jump, and which of their clocks are stored together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..plan import steps as st
from .marks import Mark, Note

QUAD = 4
"""Words that a store may write at most, and of which a run has whole ones."""
NARROW = 96
"""Registers a thread below which a role keeps a pair of clocks only."""
ROOMY = 160
"""Registers a thread from which on a role keeps all the clocks before a softmax, so that one jump passes over their stores."""


def clocks_kept(role: st.Role) -> int:
    """Clocks that a role keeps in registers until they are stored: a single thread has few registers, and time."""
    if role.elect:
        return 1
    if role.registers is None or role.registers >= ROOMY:
        return 6
    return 3 if role.registers >= NARROW else 2


@dataclass(frozen=True)
class Run:
    """Marks of a role that follow one another whenever its first one is made, and the words of the buffer that hold it."""

    role: str
    words: int
    marks: tuple[Mark, ...]


def place_roles(roles: tuple[st.Role, ...]) -> tuple[tuple[st.Role, ...], dict[int, Run]]:
    """The roles, whose marks know their words and what is stored after them; and their runs by the codes that tell them."""
    runs: dict[int, Run] = {}
    return tuple(replace(role, body=_Placer(role, runs).body(role.body)) for role in roles), runs


class _Placer:
    """Joins a role's marks to runs: in one block, with no loop, condition or way out between them that has marks of its own. A vote may
    have: the marks of either side go on with the run, in the same words, and the last ones are one."""

    def __init__(self, role: st.Role, runs: dict[int, Run]):
        self._role, self._runs = role.name, runs
        self._kept = clocks_kept(role)

    def body(self, body: st.Body) -> st.Body:
        steps, run = list(body), list[int]()

        def close() -> None:
            if run:
                self._place(steps, run)
            run.clear()

        for i, step in enumerate(steps):
            if isinstance(step, Mark):
                if not _joins(step, [steps[k] for k in run]):
                    close()
                run.append(i)
            elif _is_fork(step) and run and not any(_is_fork(steps[k]) for k in run):
                run.append(i)
            elif _marks_in(step):
                close()
                inner: dict[str, Any] = {n: self.body(b) for n, b in st.bodies(step)}
                steps[i] = replace(step, **inner)
            elif isinstance(step, st.Break):
                close()
        close()
        return tuple(steps)

    def _place(self, steps: list[st.Step], run: list[int]) -> None:
        """Gives the steps `run`, marks and at most one vote, their words and what is stored after them."""
        parts = [steps[i] for i in run]
        fork = next((k for k, part in enumerate(parts) if isinstance(part, st.Vote)), len(parts))
        usual, other = (_own_marks(body) for body in _sides(parts[fork:]))
        outer = [part if isinstance(part, Mark) else usual[-1] for part in parts]
        variable = _variable(parts)
        told = next(k for k, m in enumerate(outer) if m.variable == variable)
        tells = Note(0, (), outer[0].code, variable)
        layout = _Layout(self._kept)
        marks = layout.noted(outer, _groups(outer, told, fork), told, tells)
        sides = [_Layout(self._kept, layout.end) for _ in range(2)]
        usual_marks, other_marks = (x.noted(side[:-1], _groups(side[:-1])) for x, side in zip(sides, (usual, other)))
        words = -(-max(x.end for x in sides) // QUAD) * QUAD
        marks, usual_marks, other_marks = _leaving(marks, words), _left(usual_marks, words), _left(other_marks, words)
        self._runs[outer[0].code] = Run(self._role, words, (*marks[:fork], *usual_marks, *marks[fork:]))
        if other:
            joint = replace(marks[fork], joint=True)
            usual_marks.append(joint)
            other_marks.append(replace(other[-1], clock=joint.clock, word=joint.word, notes=joint.notes, joint=True))
            rename = replace(tells, code=other[0].code, left=words)
            other_marks[0] = replace(other_marks[0], notes=(*other_marks[0].notes, rename))
            self._runs[other[0].code] = Run(self._role, words, (*marks[:fork], *other_marks, *marks[fork + 1 :]))
        for k, i in enumerate(run):
            step = steps[i]
            if isinstance(step, st.Vote):
                steps[i] = replace(step, then=_with(step.then, other_marks), orelse=_with(step.orelse, usual_marks))
            else:
                steps[i] = marks[k]


class _Layout:
    """The words of a run, from its beginning on. What is stored at once lies at a multiple of its size."""

    def __init__(self, kept: int, end: int = 0):
        self._kept, self.end = kept, end

    def noted(self, marks: Sequence[Mark], groups: Sequence[list[int]], told: int = -1, tells: Note | None = None) -> list[Mark]:
        """The marks with their words and notes. `tells` goes with the last stores of the group of mark `told`, at the run's beginning."""
        chunks = []
        for group in groups:
            chunks += self._chunks(group, tells if told in group else None, self._at_once(marks[group[0]].what == "softmax"))
        self.end += sum(_size(len(chunk) + 1) for _, chunk, telling in chunks if telling)
        out = list(marks)
        for at, chunk, telling in chunks:
            note = telling or Note(self._take(_size(len(chunk))), ())
            first = note.word + (telling is not None)
            for n, k in enumerate(chunk):
                out[k] = replace(out[k], clock=f"clock_{marks[k].code}", word=first + n)
            note = replace(note, clocks=tuple(out[k].clock for k in chunk))
            out[at] = replace(out[at], notes=(*out[at].notes, note))
        return out

    def _at_once(self, tight: bool) -> int:
        """Words that a store may write. What is stored at once has its registers side by side, all taken from the first clock on: where a
        softmax leaves few, only two."""
        return min(self._kept, 2) if tight and self._kept < QUAD else _size(min(self._kept, QUAD))

    def _chunks(self, group: list[int], tells: Note | None, words: int) -> list[tuple[int, list[int], Note | None]]:
        """What is stored at once: the mark after which, the marks, and what tells the run or None, which is stored last."""
        chunks: list[tuple[int, list[int], Note | None]] = []
        for i in range(0, len(group), self._kept):
            part = group[i : i + self._kept]
            telling = tells if i + self._kept >= len(group) else None
            beside = words - 1 if telling else 0  # clocks in the store that tells
            rest = part[beside:]
            chunks += [(part[-1], rest[k : k + words], None) for k in range(0, len(rest), words)]
            chunks += [(part[-1], part[:beside], telling)] if telling else []
        return chunks

    def _take(self, words: int) -> int:
        first = -(-self.end // words) * words
        self.end = first + words
        return first


def _size(words: int) -> int:
    """What a store of so many words writes."""
    return next(size for size in (1, 2, 4) if size >= words)


def _sides(parts: Sequence[st.Step]) -> tuple[st.Body, st.Body]:
    """Of the vote that `parts` begin with: the usual side and the other one; of none: nothing."""
    vote = parts[0] if parts else None
    return (vote.orelse, vote.then) if isinstance(vote, st.Vote) else ((), ())


def _with(body: st.Body, marks: Sequence[Mark]) -> st.Body:
    """With these instead of its own marks."""
    rest = iter(marks)
    return tuple(next(rest) if isinstance(step, Mark) else step for step in body)


def _groups(marks: Sequence[Mark], told: int = -1, fork: int = -1) -> list[list[int]]:
    """Numbers of marks whose clocks stay in registers until the last one of them: not through a softmax, which has none to spare.

    `told`: from this one on the run can be told, which must be done before the vote at `fork`, whose other side tells it anew. A tile's
    number is told at once, since it need not live through the tile."""
    groups: list[list[int]] = []
    for k, mark in enumerate(marks):
        apart = mark.what == "softmax" or (k > 0 and marks[k - 1].what == "tile")
        if not groups or apart or (k == fork and told in groups[-1]):
            groups.append([])
        groups[-1].append(k)
    return groups


def _left(marks: Sequence[Mark], words: int) -> list[Mark]:
    """In a run of `words` that has been left behind."""
    return [replace(m, notes=tuple(replace(n, left=words) for n in m.notes)) for m in marks]


def _leaving(marks: Sequence[Mark], words: int) -> list[Mark]:
    """A run of `words` is left behind as soon as it is told, so that an address need not be kept through its softmax."""
    out, left = list[Mark](), 0
    for mark in marks:
        notes = []
        for n in mark.notes:
            notes.append(replace(n, leaves=words) if n.code is not None else replace(n, left=left))
            left = words if n.code is not None else left
        out.append(replace(mark, notes=tuple(notes)))
    return out


def _joins(mark: Mark, run: list[st.Step]) -> bool:
    """A run has one argument, which is told before a vote; each tile is told."""
    variable = _variable(run)
    if mark.variable in ("", variable):
        return not (mark.what == "tile" and variable)
    return not variable and not any(map(_is_fork, run))


def _own_marks(body: st.Body) -> tuple[Mark, ...]:
    return tuple(step for step in body if isinstance(step, Mark))


def _marks_in(step: st.Step) -> tuple[Mark, ...]:
    return tuple(s for _, body in st.bodies(step) for s in st.walk(body) if isinstance(s, Mark))


def _is_fork(step: st.Step) -> bool:
    """A vote both sides of which end with a mark, and make marks in no deeper block."""
    sides = [body for _, body in st.bodies(step)] if isinstance(step, st.Vote) else []
    ends = bool(sides) and all(body and isinstance(body[-1], Mark) for body in sides)
    return ends and sum(len(_own_marks(body)) for body in sides) == len(_marks_in(step))


def _variable(run: Sequence[st.Step]) -> str:
    """What the argument of a run is, "" if none of its marks has one."""
    marks = (m for step in run for m in ((step,) if isinstance(step, Mark) else _marks_in(step)))
    return next((m.variable for m in marks if m.variable), "")
