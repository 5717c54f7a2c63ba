"""The sizes a kernel is proven for: key blocks 0, 1, stages − 1, stages, stages + 1 and 2·stages + 1, one to three tiles a CTA. Under a
causal mask also 1 and 2·stages + 1 behind the diagonal's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ...attention import Attention
from ...schedule import Schedule
from ..kernel import DESCALES, STRIDED, KernelPlan, Problem

MOST_TILES = 3


@dataclass(frozen=True)
class Case:
    """One CTA of one problem on a device of `num_sms` multiprocessors."""

    problem: Problem
    num_sms: int
    cta: int

    def __str__(self) -> str:
        p = self.problem
        return f"batch {p.batch}, heads {p.hq}, seqlen_q {p.sq}, seqlen_k {p.sk}, CTA {self.cta} on {self.num_sms} SMs"

    def scope(self, kernel: KernelPlan) -> dict[str, int]:
        """The symbols that the kernel's steps may use (without `w`)."""
        scope = _launch(kernel, self.problem, self.num_sms)
        return {
            **{p.name: scope[p.name] for p in kernel.params if p.ctype != "f32"},
            "n_ctas": kernel.grid.eval(scope),
            "cta": self.cta,
        }


def _launch(kernel: KernelPlan, problem: Problem, num_sms: int) -> dict[str, int]:
    """The host's symbols and the kernel's parameters (any strides do: they move no synchronisation)."""
    scope = {f: getattr(problem, f) for f in ("batch", "sq", "sk", "hq", "hkv")} | {
        "num_sms": num_sms,
        "seed": 0,
        "trace_first": 0,
        "trace_count": 4,
    }
    scope |= {f"{t}_{s}": 1 for t in (*STRIDED, *DESCALES) for s in ("sb", "ss", "sh")}
    for p in kernel.params:
        if p.ctype != "f32":
            scope[p.name] = p.value.eval(scope)
    return scope


@dataclass(frozen=True)
class Cases:
    """Chooses the cases for one kernel."""

    kernel: KernelPlan
    attention: Attention
    schedule: Schedule

    @cached_property
    def trip_counts(self) -> tuple[int, ...]:
        counts = {0, 1}
        for s in (self.schedule.stages_k, self.schedule.stages_v):
            counts |= {s - 1, s, s + 1, 2 * s + 1}
        return tuple(sorted(counts))

    def all(self) -> Iterator[Case]:
        """Every trip count with 1 to 3 tiles a CTA where a CTA owns several; lengths that fill their tiles and lengths that do not."""
        for n in self.trip_counts:
            for tiles in self._tile_counts():
                for ragged in (False, True):
                    yield from self._ctas(self._problem(n, tiles, ragged), 1)
        if self.schedule.loop_order == "kv_outer" and self.attention.causal:  # rows of one tile that end in different blocks
            s = self.schedule
            yield from self._ctas(Problem(1, 2 * s.tile_q, 2 * s.tile_kv + s.tile_q // 2, 1, 1), 1)
        if self.attention.causal and self.schedule.loop_order == "q_outer":  # the same behind the diagonal, whose blocks come first
            s = self.schedule
            for n in sorted({1, self.trip_counts[-1]}):
                tiles = self._tile_counts()[-1]
                yield from self._ctas(Problem(1, s.tile_q, n * s.tile_kv + s.tile_q, tiles, tiles), 1)
        if self.schedule.skip_masked:  # the trip counts of the first warpgroup, where the last one has more
            s = self.schedule
            for n in self.trip_counts:
                keys = n * s.tile_kv + s.tile_q - 64
                for tiles in self._tile_counts():
                    yield from self._ctas(Problem(1, s.tile_q, keys, tiles, tiles), 1)
        if self._persistent or self._range:  # two CTAs that share the tiles
            yield from self._ctas(self._problem(self.trip_counts[-1], MOST_TILES, True), 2)

    def few(self) -> tuple[Case, ...]:
        """The cases that show most mistakes at once, for the first look at a mutant."""
        tiles = self._tile_counts()[-1]
        chosen = [(self.trip_counts[-1], min(tiles, 2), True), (1, tiles, False), (0, tiles, False)]
        return tuple(case for n, t, ragged in chosen for case in list(self._ctas(self._problem(n, t, ragged), 1))[-1:])

    @property
    def _persistent(self) -> bool:
        return self.schedule.parallelism.startswith("persistent")

    @property
    def _range(self) -> bool:
        """A CTA owns several tiles of one head."""
        return self.schedule.parallelism == "batch_heads" or self.schedule.loop_order == "kv_outer"

    def _tile_counts(self) -> tuple[int, ...]:
        many = self._persistent or self._range
        return tuple(range(1, MOST_TILES + 1)) if many else (MOST_TILES,)

    def _problem(self, n: int, tiles: int, ragged: bool) -> Problem:
        """`n` key blocks (of the longest tile, under a causal mask) and `tiles` tiles: of as many heads, or if `ragged` of one
        sequence, so that under a causal mask every tile has its own trip count, 0 included."""
        s = self.schedule
        sk = max(n * s.tile_kv - (5 if ragged else 0), 0)
        if self._range:
            return Problem(1, tiles * s.tile_q - 3, sk, 2, 2) if ragged else Problem(1, tiles * s.tile_q, sk, 1, 1)
        if ragged:
            return Problem(1, tiles * s.tile_q - 3, sk, 1, 1)
        return Problem(2, s.tile_q, sk, 1, 1) if tiles == 2 else Problem(1, s.tile_q, sk, tiles, tiles)

    def _ctas(self, problem: Problem, num_sms: int) -> Iterator[Case]:
        """The first and the last CTA, and where they differ in kind the first of each kind."""
        scope = _launch(self.kernel, problem, num_sms)
        grid = self.kernel.grid.eval(scope)
        kinds = {min(k.eval(scope), grid - 1) for k in self.kernel.kinds}
        for cta in sorted({0, grid - 1} | kinds):
            yield Case(problem, num_sms, cta)
