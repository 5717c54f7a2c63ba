"""Words of a trace buffer → lanes of spans. All times are SM cycles, counted from the first lane's start in each CTA."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import InputError
from ...plan import steps as st
from ...plan.kernel import TRACE_CTAS, TRACE_HEADER_WORDS, TRACE_WORDS, KernelLaunch, KernelPlan, Plan, scalar_env
from ...plan.tiles import Tiles
from ...trace import ARGUMENT_BITS, QUAD, Mark, Run, instances_of, longest_run, runs_of

Words = npt.NDArray[np.uint32]

LEAST_NS = 1000
"""A CTA must run so long for the two clocks to tell the clock rate: the global timer advances in coarse steps."""


@dataclass(frozen=True)
class Span:
    """Something that took the cycles `start` to `end`. `what`: its kind, as in `fagen.trace`, or "product", "in flight", "tile".
    `step`: ids of the steps, joined by "+". `tile`, `block`: numbers of tile and key block, None where there is none."""

    start: int
    end: int
    what: str
    name: str
    step: str
    tile: int | None = None
    block: int | None = None

    @property
    def cycles(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Track:
    """Spans that never overlap: an accumulator's products, or what a slot of a ring receives. `lane`: of the lane that issued them."""

    name: str
    lane: int
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Lane:
    """A role instance of a CTA. `spans` follow one another without a gap; `tiles` are its times between the beginnings of tiles.
    `dropped`: words for which there was no room, after the last span: a mark takes one, what tells a run of marks another, and a run is
    filled up to whole quads."""

    name: str
    role: str
    instance: int
    spans: tuple[Span, ...]
    tiles: tuple[Span, ...]
    dropped: int

    @property
    def end(self) -> int:
        return self.spans[-1].end if self.spans else 0


@dataclass(frozen=True)
class CtaTrace:
    """One CTA. `start_ns`: its first lane's start by the global timer, from that of the first CTA recorded."""

    cta: int
    sm: int
    start_ns: int
    lanes: tuple[Lane, ...]
    products: tuple[Track, ...]
    loads: tuple[Track, ...]


@dataclass(frozen=True)
class KernelTrace:
    """The recorded CTAs of a kernel. `cycles_per_us`: the SM clock while it ran."""

    kernel: str
    ctas: tuple[CtaTrace, ...]
    cycles_per_us: float

    @property
    def dropped(self) -> int:
        return sum(lane.dropped for cta in self.ctas for lane in cta.lanes)


def read(plan: Plan, launch: KernelLaunch, words: Words) -> KernelTrace:
    """What a launch of one of a trace plan's kernels noted. InputError naming `words` where they cannot be of this kernel."""
    kernel = next(k for k in plan.kernels if k.name == launch.name)
    instances = instances_of(kernel)
    lanes = TRACE_CTAS * len(instances)
    expected = lanes * (TRACE_WORDS + TRACE_HEADER_WORDS)
    if words.size != expected:
        raise InputError("words", f"{words.size} words, the trace of kernel {kernel.name} has {expected}")
    env = scalar_env(kernel, launch)
    first = env["trace_first"]
    count = min(TRACE_CTAS, launch.grid - first)
    if count <= 0:
        raise InputError("words", f"nothing was recorded: CTA {first} is not among the {launch.grid} of kernel {kernel.name}")
    noted = words[: TRACE_WORDS * lanes].reshape(-1, lanes, QUAD)[::-1]
    headers = words[TRACE_WORDS * lanes :].reshape(TRACE_CTAS, len(instances), TRACE_HEADER_WORDS)
    _check_headers(kernel, headers[:count], first)
    decoder = _Decoder(plan, kernel, env)
    ctas = []
    zero = _timer(headers[0, 0, 0:2])
    for c in range(count):
        base = c * len(instances)
        ctas.append(decoder.cta(first + c, headers[c], [noted[:, base + i].ravel() for i in range(len(instances))], zero))
    return KernelTrace(kernel.name, tuple(ctas), _rate(kernel, headers[:count]))


def _check_headers(kernel: KernelPlan, headers: Words, first: int) -> None:
    for c, of_cta in enumerate(headers):
        for (role, w), h in zip(instances_of(kernel), of_cta):
            if (h[4:] == 0xFFFFFFFF).all():
                raise InputError("words", f"{role.name} {w} of CTA {first + c} never came to its end")


def _timer(words: Words) -> int:
    return int(words[0]) | int(words[1]) << 32


def _rate(kernel: KernelPlan, headers: Words) -> float:
    """Cycles per µs, by the lane that ran longest."""
    ns, cycles = max((_timer(h[4:6]) - _timer(h[0:2]), (int(h[6]) - int(h[2])) & 0xFFFFFFFF) for of_cta in headers for h in of_cta)
    if ns < LEAST_NS:
        raise InputError(
            "words", f"kernel {kernel.name} ran for {ns} ns, too short to tell its clock rate ({LEAST_NS} ns): a larger problem"
        )
    return 1000 * cycles / ns


@dataclass
class _Open:
    """What a CTA's lanes have begun and others end."""

    products: dict[str, list[Span]] = field(default_factory=lambda: defaultdict(list))  # by track
    owner: dict[str, int] = field(default_factory=dict)
    issued: dict[str, list[Span]] = field(default_factory=lambda: defaultdict(list))  # by barrier, in order
    loader: dict[str, int] = field(default_factory=dict)
    seen: dict[str, dict[int, list[int]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))


@dataclass
class _Noted:
    """What a lane's words say: its marks with their clocks and arguments, and how many words had no room."""

    marks: list[Mark] = field(default_factory=list)
    clocks: list[int] = field(default_factory=list)
    arguments: list[int] = field(default_factory=list)
    dropped: int = 0


class _Decoder:
    def __init__(self, plan: Plan, kernel: KernelPlan, env: Mapping[str, int]):
        self._kernel, self._env = kernel, env
        self._runs, self._longest = runs_of(kernel), longest_run(kernel)
        self._decode = Tiles(plan.attention, plan.schedule, plan.target).decode()
        self._block_rows = plan.schedule.tile_kv

    def cta(self, number: int, headers: Words, words: list[Words], zero: int) -> CtaTrace:
        shared = _Open()
        start = headers[0, 2]
        lanes = []
        for i, ((role, w), h, of) in enumerate(zip(instances_of(self._kernel), headers, words)):
            name = f"{role.name} {w}" if role.count > 1 else role.name
            noted = self._noted(f"{name} in CTA {number}", role, of, int(h[7]))
            lanes.append(self._lane(i, role, w, number, name, _unwrapped(h[2], start, noted.clocks), noted, shared))
        products = tuple(Track(name, shared.owner[name], tuple(spans)) for name, spans in shared.products.items())
        sm = int(headers[0, 3])
        return CtaTrace(number, sm, _timer(headers[0, 0:2]) - zero, tuple(lanes), products, self._loads(shared))

    def _noted(self, where: str, role: st.Role, words: Words, count: int) -> _Noted:
        """Of a lane that noted `count` words. The kernel keeps a run if behind it the longest one had room."""
        noted, at = _Noted(), 0
        while at < count:
            if at + self._longest > TRACE_WORDS:
                break
            code, argument = int(words[at]) >> ARGUMENT_BITS, int(words[at]) & ((1 << ARGUMENT_BITS) - 1)
            run = self._run(where, role, code, len(noted.marks))
            if at + run.words + self._longest > TRACE_WORDS:
                break
            noted.marks += run.marks
            noted.clocks += [int(words[at + m.word]) for m in run.marks]
            noted.arguments += [argument] * len(run.marks)
            at += run.words
        if at > count:
            raise InputError("words", f"{where} ends within a run of marks")
        noted.dropped = count - at
        return noted

    def _run(self, where: str, role: st.Role, code: int, mark: int) -> Run:
        run = self._runs.get(code)
        if run is None or run.role != role.name:
            raise InputError("words", f"mark {mark} of {where} has code {code}, which begins no run of that role's")
        return run

    def _lane(self, index: int, role: st.Role, w: int, cta: int, name: str, times: list[int], noted: _Noted, shared: _Open) -> Lane:
        spans: list[Span] = []
        tiles: list[Span] = []
        opened: dict[str, Span] = {}  # by accumulator
        tile, last = dict[str, int](), dict[str, int]()
        for start, end, mark, argument in zip(times, times[1:], noted.marks, noted.arguments):
            if mark.what == "tile":
                last, tile = tile, self._variables({mark.variable: argument, "cta": cta, "w": w} if mark.variable else {})
                if tiles:
                    tiles[-1] = _until(tiles[-1], start)
                if mark.variable:
                    tiles.append(Span(start, end, "tile", f"{mark.variable} {argument}", mark.name, argument))
            variables = {**self._env, **(last if mark.of_last_tile else tile), "cta": cta, "w": w}
            if mark.variable:
                variables[mark.variable] = argument
            at = {"tile": variables.get("tile", variables.get("m")), "block": self._block(mark, variables)}
            spans.append(Span(start, end, mark.what, _title(mark), mark.name, **at))
            self._follow(mark, spans[-1], index, name, opened, shared)
        if tiles:
            tiles[-1] = _until(tiles[-1], spans[-1].end)
        return Lane(name, role.name, w, tuple(spans), tuple(tiles), noted.dropped)

    def _follow(self, mark: Mark, span: Span, lane: int, name: str, opened: dict[str, Span], shared: _Open) -> None:
        """What begins at a mark and runs on, and what ends there."""
        step = mark.group[-1] if mark.group else None
        if isinstance(step, st.Mma) and step.unit == "wgmma":
            opened[step.d] = Span(span.end, span.end, "product", span.name, span.step, span.tile, span.block)
        elif isinstance(step, st.MmaWait):
            for frag in step.ready:
                if frag in opened:
                    track = f"{name}: {frag}"
                    shared.owner[track] = lane
                    shared.products[track].append(_until(opened.pop(frag), span.end))
        elif isinstance(step, st.TmaLoad):
            shared.loader[step.full] = lane
            shared.issued[step.full].append(Span(span.end, span.end, "in flight", span.name, span.step, span.tile, span.block))
        elif isinstance(step, st.Wait):
            shared.seen[step.bar][lane].append(span.end)

    def _loads(self, shared: _Open) -> tuple[Track, ...]:
        """The n-th load that completes a barrier is what the n-th wait for it sees. One track for each slot of the ring."""
        tracks = []
        for bar, issued in shared.issued.items():
            stages = self._kernel.mbar_of(bar).stages
            slots: list[list[Span]] = [[] for _ in range(stages)]
            for n, load in enumerate(issued):
                seen = [times[n] for times in shared.seen[bar].values() if n < len(times)]
                if seen:
                    slots[n % stages].append(_until(load, max(load.start, min(seen))))
            ring = bar.removesuffix("_full").upper()
            tracks += [Track(f"{ring}[{i}]", shared.loader[bar], tuple(spans)) for i, spans in enumerate(slots)]
        return tuple(tracks)

    def _variables(self, known: Mapping[str, int]) -> dict[str, int]:
        """Of a tile: m, h, b, n … as the kernel decodes them."""
        found: dict[str, int] = dict(known)
        for step in self._decode:
            assert isinstance(step, st.Let)
            scope = {**self._env, **found}
            if step.value.symbols() <= scope.keys():
                found.setdefault(step.var, step.value.eval(scope))
        return found

    def _block(self, mark: Mark, variables: Mapping[str, int]) -> int | None:
        """Number of the key block that a product reads, a load brings, or a loop is at."""
        step = mark.group[-1] if mark.group else None
        row = None
        if isinstance(step, st.Mma):
            row = step.b.holds
        elif isinstance(step, (st.TmaLoad, st.CpAsync, st.Copy)) and step.src in ("k", "v"):
            row = step.seq
        if row is not None and row.symbols() <= variables.keys():
            return row.eval(variables) // self._block_rows
        return variables["j"] if mark.variable == "j" else None


def _unwrapped(start: Any, zero: Any, clocks: Sequence[int]) -> list[int]:
    """Cycles from `zero` of a lane's start and of its marks: the counter's lower half runs over every few seconds."""
    offset = int(np.int32(np.uint32((int(start) - int(zero)) & 0xFFFFFFFF)))
    steps = np.diff(np.array([start, *clocks], np.uint32)).astype(np.int64)
    times: list[int] = (offset + np.concatenate([[0], np.cumsum(steps)])).astype(np.int64).tolist()
    return times


def _until(span: Span, end: int) -> Span:
    return Span(span.start, end, span.what, span.name, span.step, span.tile, span.block)


def _title(mark: Mark) -> str:
    """A short name: the last step's own, without the number of its repetition."""
    if not mark.group:
        return "tile"
    step = mark.group[-1]
    if isinstance(step, st.MmaWait):
        return "wait_" + "_".join(step.ready)
    return next(part for part in reversed(step.id.split(".")) if not part.isdigit())
