"""Measures and predicts: every recipe of every trial on the GPU (if there is one), its sampled rows in the simulator, both against float64."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ..attention import Attention
from ..check.judge import pool
from ..errors import InputError
from ..oracle import simulate
from ..oracle.blocks import problem_of
from ..oracle.numeric import Array
from ..oracle.quantise import Quantiser, quantise
from ..plan.kernel import Problem
from .recipes import PLAIN, Recipe
from .result import SCHEMA, WITHIN, AccuracyResult, AccuracyRow, Errors, Experiment
from .tensors import Given, Part, Source, given, in_half, parts
from .truth import Truth, truth

PARTS = 16
"""Pieces of query rows that are simulated."""
MOST_SCORES = 1 << 30
"""Scores of a problem above which only some rows of every head get a reference: float64 takes a minute of a core for so many."""

WORTH_PROCESSES = 1 << 26
"""Scores above which more processes than this one pay; starting one takes a second."""

Head = tuple[int, int]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Trial:
    """Tensors, and the rows to make of them: (kernel's name, recipe), all of one head_dim, mask and softmax scale."""

    title: str
    source: Source
    recipes: tuple[tuple[str, Recipe], ...]


@dataclass(frozen=True)
class Measured:
    """What came out on the GPU. `out` (batch, seqlen_q, heads, head_dim_v), `lse` (batch, heads, seqlen_q) or None; out None: the function
    did not run, for that `reason`."""

    out: Array | None
    lse: Array | None
    reason: str = ""


@dataclass(frozen=True)
class PeerRow:
    """A row of another's kernel: its name in tables, and what a `Recipe` has besides a schedule."""

    name: str
    label: str
    attention: Attention
    quantiser: Quantiser | None


@dataclass(frozen=True)
class OnGpu:
    """A trial's outputs: of its recipes in their order (None: refused by the plan), and of peers."""

    recipes: Sequence[Measured | None]
    peers: Sequence[tuple[PeerRow, Measured]]


def run_trials(
    trials: Sequence[Trial],
    *,
    seed: int,
    measured: Sequence[OnGpu] | None = None,
    gpu: str = "",
    driver: str = "",
    versions: Mapping[str, str] | None = None,
    say: Say = lambda _: None,
) -> AccuracyResult:
    """The table of every trial. `measured`: what a GPU gave for each (see `fagen.accuracy.gpu`), None: only predictions. `seed` chooses the
    rows that are simulated. `say` hears of every step."""
    started, clock = datetime.datetime.now(datetime.timezone.utc), time.perf_counter()
    found = tuple(_trial(t, None if measured is None else measured[i], seed, say) for i, t in enumerate(trials))
    return AccuracyResult(
        SCHEMA,
        started.isoformat(timespec="seconds"),
        round(time.perf_counter() - clock, 3),
        gpu,
        driver,
        dict(versions or {}),
        seed,
        found,
    )


def attention_of(trial: Trial) -> Attention:
    """What all rows of a trial compute, on the tensors' own type. InputError where two differ in more than type."""
    wanted = {(r.attention.head_dim, r.attention.mask, r.attention.softmax_scale) for _, r in trial.recipes}
    if len(wanted) != 1:
        raise InputError("SCHEDULE", "the rows of one table compute the same: one head_dim, mask and scale")
    ((head_dim, mask, scale),) = wanted
    return Attention(head_dim=head_dim, dtype=trial.source.dtype, mask=mask, scale=scale)


def _trial(trial: Trial, on_gpu: OnGpu | None, seed: int, say: Say) -> Experiment:
    attention = attention_of(trial)
    exact, half = trial.source.tensors(), in_half(trial.source)
    problem = problem_of(attention, *exact)
    group = problem.hq // max(1, problem.hkv)
    eight_bit = any(r.quantiser and not r.refused for _, r in trial.recipes)
    coarse = quantise(*half, Quantiser(granularity=PLAIN.granularity)).dequantised() if eight_bit else None
    if problem.empty or not problem.sk:
        raise InputError("--shape" if problem.empty else "k", "there is nothing to compare: no query rows, or no keys")
    rows = math.lcm(*(r.schedule.tile_q for _, r in trial.recipes))
    pieces = parts(problem, rows, PARTS, seed)
    wanted = _rows_by_head(problem, pieces, None if on_gpu is None else seed)
    legal = [(name, r) for name, r in trial.recipes if not r.refused]
    scores = problem.sk * sum(map(len, wanted.values())) * (1 + len(legal))
    with pool(len(wanted) + len(legal) * len(pieces) if scores > WORTH_PROCESSES else 1) as workers:
        truths = {
            at: workers.submit(
                truth, attention, *_head(*exact, at, group), index, None if coarse is None else _head(*coarse, at, group)
            )
            for at, index in wanted.items()
        }
        predictions = {id(r): _predictions(workers, r, given(r.quantiser, r.attention, *half), pieces) for _, r in legal}
        known: dict[Head, Truth] = {}
        for at, future in truths.items():
            known[at] = future.result()
            say(f"{trial.title}: reference of batch {at[0]}, head {at[1]}")
        table = _Table(known, pieces, on_gpu is not None)
        out = table.standard(attention)
        for n, (name, recipe) in enumerate(trial.recipes):
            simulated = [f.result() for f in predictions.get(id(recipe), ())]
            out.append(table.schedule(name, recipe, simulated, None if on_gpu is None else on_gpu.recipes[n]))
            say(f"{trial.title}: {name} {recipe.label}")
        out += [table.peer(row, result) for row, result in (() if on_gpu is None else on_gpu.peers)]
    rms = math.sqrt(float(np.mean(np.concatenate([table.judged(t).ravel() ** 2 for t in known.items()]))))
    return Experiment(
        trial.title,
        trial.source.text,
        trial.source.dtype,
        problem,
        attention.mask,
        attention.softmax_scale,
        rms,
        tuple(out),
    )


def _rows_by_head(problem: Problem, pieces: Sequence[Part], seed: int | None) -> dict[Head, npt.NDArray[np.int64]]:
    """Query rows of every head that get a reference: those of the pieces; with a `seed` besides all others, or, where those are too many,
    as many of each head as keep within `MOST_SCORES`."""
    found: dict[Head, npt.NDArray[np.int64]] = {}
    if seed is not None:
        rng = np.random.default_rng((seed, 3))
        most = max(1, MOST_SCORES // (problem.batch * problem.hq * problem.sk))
        for at in np.ndindex(problem.batch, problem.hq):
            found[at] = np.sort(rng.choice(problem.sq, min(most, problem.sq), replace=False))
    for p in pieces:
        found[p.batch, p.head] = np.union1d(found.get((p.batch, p.head), np.zeros(0, np.int64)), np.arange(p.first, p.last))
    return found


def _head(q: Array, k: Array, v: Array, at: Head, group: int) -> tuple[Array, Array, Array]:
    b, h, kv = slice(at[0], at[0] + 1), slice(at[1], at[1] + 1), slice(at[1] // group, at[1] // group + 1)
    return q[b, :, h], k[b, :, kv], v[b, :, kv]


def _predictions(workers: Executor, recipe: Recipe, inputs: Given, pieces: Sequence[Part]) -> list[Future[tuple[Array, Array]]]:
    s, causal = recipe.schedule, recipe.attention.causal
    return [workers.submit(predict, recipe, inputs.part(p, s.tile_q, s.tile_kv, causal)) for p in pieces]


def predict(recipe: Recipe, inputs: Given) -> tuple[Array, Array]:
    """out (rows, head_dim_v) and lse (rows,) of a problem of one head, by the simulator."""
    out, lse = simulate(recipe.attention, recipe.schedule, inputs.q, inputs.k, inputs.v, exact_sums=True, **inputs.descales)
    return out[0, :, 0].astype(np.float64), lse[0, 0] + (0 if inputs.shift is None else inputs.shift[0, 0])


# errors -------------------------------------------------------------------------------------------------------------------


@dataclass
class _Tally:
    """Adds up errors."""

    rows: int = 0
    squares: float = 0.0
    elements: int = 0
    largest: float = 0.0
    lse_squares: float = 0.0
    lse_rows: int = 0
    with_lse: bool = True

    def add(self, out: Array, want: Array, lse: Array | None, want_lse: Array) -> None:
        error = np.abs(out.astype(np.float64) - want)
        self.rows += len(error)
        self.squares += float((error**2).sum())
        self.elements += error.size
        self.largest = max(self.largest, float(error.max(initial=0.0)))
        self.with_lse &= lse is not None
        if lse is not None:
            finite = np.isfinite(want_lse)
            self.lse_squares += float(((lse[finite].astype(np.float64) - want_lse[finite]) ** 2).sum())
            self.lse_rows += int(finite.sum())

    def errors(self) -> Errors | None:
        """None where something was not finite."""
        of_lse = math.sqrt(self.lse_squares / max(1, self.lse_rows)) if self.with_lse else None
        rmse = math.sqrt(self.squares / max(1, self.elements))
        if not (math.isfinite(rmse) and (of_lse is None or math.isfinite(of_lse))):
            return None
        return Errors(self.rows, rmse, self.largest, of_lse)


@dataclass
class _Table:
    """Makes rows of what came out. `all_rows`: a GPU's outputs are compared on every row that has a reference."""

    truths: dict[Head, Truth]
    pieces: Sequence[Part]
    all_rows: bool
    _places: list[tuple[Truth, npt.NDArray[np.int64]]] = field(init=False)

    def __post_init__(self) -> None:
        self._places = []
        for p in self.pieces:
            t = self.truths[p.batch, p.head]
            self._places.append((t, np.searchsorted(t.rows, np.arange(p.first, p.last))))

    def judged(self, at: tuple[Head, Truth]) -> Array:
        """out of the reference's rows of a head that the first column of errors speaks of."""
        head, t = at
        if self.all_rows:
            return t.out
        mine = [i for p, (_, i) in zip(self.pieces, self._places) if (p.batch, p.head) == head]
        return t.out[np.concatenate(mine)]

    def standard(self, attention: Attention) -> list[AccuracyRow]:
        """Standard attention on the 16-bit tensors, and on those rounded to e4m3 with a scale for each tensor."""
        label = f"scores, P and out in {attention.dtype}"
        rows = [self._in_numpy(label, attention, [t.standard for t in self.truths.values()])]
        eighth = [t.standard_e4m3 for t in self.truths.values() if t.standard_e4m3 is not None]
        if eighth:
            label = f"e4m3 per tensor; scores and out in {attention.dtype}, P in e4m3"
            rows.append(self._in_numpy(label, attention, eighth))
        return rows

    def _in_numpy(self, label: str, attention: Attention, outs: Sequence[Array]) -> AccuracyRow:
        """`outs`: of the heads, in the order of the truths."""
        whole, sampled = _Tally(with_lse=False), _Tally(with_lse=False)
        of_head = dict(zip(self.truths, outs))
        for at, t in self.truths.items():
            whole.add(of_head[at], t.out, None, t.lse)
        for p, (t, index) in zip(self.pieces, self._places):
            sampled.add(of_head[p.batch, p.head][index], t.out[index], None, t.lse[index])
        row = AccuracyRow("standard attention", "standard", label, attention, None, None, "right", "", None, None, sampled.errors())
        return replace(row, measured=whole.errors()) if self.all_rows else row

    def schedule(
        self, name: str, recipe: Recipe, simulated: Sequence[tuple[Array, Array]], measured: Measured | None
    ) -> AccuracyRow:
        r = recipe
        row = AccuracyRow(name, "schedule", r.label, r.attention, r.schedule, r.quantiser, "right", "", None, None, None)
        if r.refused:
            return replace(row, outcome="refused", reason=r.refused)
        tally = _Tally()
        for (t, index), (out, lse) in zip(self._places, simulated):
            tally.add(out, t.out[index], lse, t.lse[index])
        row = replace(row, predicted=tally.errors())
        if row.predicted is None:
            row = replace(row, outcome="wrong", reason="simulated: out or lse has NaN or inf")
        return row if measured is None else self._compared(row, measured)

    def peer(self, peer: PeerRow, measured: Measured) -> AccuracyRow:
        row = AccuracyRow(peer.name, "peer", peer.label, peer.attention, None, peer.quantiser, "right", "", None, None, None)
        return self._compared(row, measured)

    def _compared(self, row: AccuracyRow, measured: Measured) -> AccuracyRow:
        """The row with what came out on the GPU: on all rows that have a reference, and on those that are simulated."""
        if measured.out is None:
            return replace(row, outcome="absent", reason=measured.reason)
        whole, sampled = _Tally(), _Tally()
        for (b, h), t in self.truths.items():
            lse = None if measured.lse is None else measured.lse[b, h, t.rows]
            whole.add(measured.out[b, t.rows, h], t.out, lse, t.lse)
        for p, (t, index) in zip(self.pieces, self._places):
            lse = None if measured.lse is None else measured.lse[p.batch, p.head, p.first : p.last]
            sampled.add(measured.out[p.batch, p.first : p.last, p.head], t.out[index], lse, t.lse[index])
        row = replace(row, measured=whole.errors(), sampled=sampled.errors())
        if row.measured is None or row.sampled is None:
            return replace(row, outcome="wrong", reason="measured: out or lse has NaN or inf")
        if row.predicted is not None and abs(row.sampled.rmse - row.predicted.rmse) > WITHIN * row.predicted.rmse:
            return replace(row, outcome="off", reason=f"measured {row.sampled.rmse:.3e}, predicted {row.predicted.rmse:.3e}")
        return row
