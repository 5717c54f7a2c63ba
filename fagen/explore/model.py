"""How long a plan takes on a problem, predicted from its program: `replay` times a few tiles on one SM, the rest is dealing them out.

    clocks of a tile   two small problems of the plan's own tiles, replayed with the program's waits and shared units; a straight line
                       between them gives a tile of any number of key blocks
    clocks of an SM    tiles dealt out as the grid does: CTAs to free slots, tiles cta, cta + SMs, …, or claimed one by one
    time               clocks at the clock rate that the power limit leaves for so much tensor-core work, or DRAM's time, both rounded
                       into each other; and the launch

Nothing in it depends on a knob by name, only on what the knob does to the program. Constants: `pace` (an SM's rates) and below.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..plan import Plan, Problem, quantise_steps
from ..plan.kernel import KernelPlan, scalar_env
from ..plan.steps import DTYPE_BYTES, Forever, Loop, Step, walk
from .machine import H200, Device
from .replay import Replayed, replay
from .roofline import MOST_UNITS, Cost, contiguous, cost
from .tally import Work, tally

QUANTISING = tuple(c for c in Step.__subclasses__() if c.__module__ == quantise_steps.__name__)
"""Steps of kernels that stream tensors once: DRAM binds them, and a replay of their tiles would say nothing more."""
MOST_BLOCKS = 12
"""Key blocks of the longer of the two small problems: by then the pipeline has long been full."""
FEW_BLOCKS = 5
MOST_CTAS = 4
"""Replayed side by side; of more on an SM these stand for the rest."""
TILES = 3
"""Of a persistent CTA: the first begins with empty rings, the later ones overlap with the one before."""
ROWS_OF_TILES = (3, 6)
"""Query tiles of a CTA that walks a head's."""

POWER_CLOCK_MHZ, POWER_SHARE = 1510.0, 0.98
"""Under bursts at 98 % tensor-core work an H200 of 700 W runs at about 1510 MHz (benchmarks/results/paper_grid.json, head_dim 128, 16k; utilisation
by ncu). Power goes with the work times the clock's third power (voltage follows the clock), so the limit leaves this · (98 % / work)^(1/3)."""
MAX_CLOCK_MHZ = 1980.0
EIGHT_BIT_POWER = 1.75
"""What an 8-bit product's clock in the tensor core draws beside a 16-bit one's; fitted to the paper's FP8 (schedules/chain)."""
ROUNDING = 2.0
"""SMs and DRAM overlap, but not perfectly: (a^p + b^p)^(1/p) instead of the larger."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Predicted:
    """`time_us`: of one launch after another, as `fagen bench` measures. By kernel: `kernels_us`. `clock_mhz`: the slowest kernel's.
    `cost`: the bounds of the roofline beside."""

    time_us: float
    kernels_us: tuple[float, ...]
    clock_mhz: float
    cost: Cost


def predict_time(plan: Plan, problem: Problem, device: Device = H200, registers: Mapping[str, int] | None = None) -> Predicted:
    """`registers`: as for `roofline.cost`. InputError for a problem that the plan cannot be launched on."""
    bounds = cost(plan, problem, device, registers)
    launch = plan.bind(problem, contiguous(plan.attention, problem, plan.schedule.v_transposed), device.sms)
    times, clocks = [], []
    for kernel, bound, its in zip(plan.kernels, launch.kernels, bounds.kernels):
        scalars = {f: getattr(problem, f) for f in ("batch", "sq", "sk", "hq", "hkv")} | scalar_env(kernel, bound)
        work = tally(kernel, scalars)
        if any(isinstance(s, QUANTISING) for r in kernel.roles for s in walk(r.body)):
            times.append(its.bound_us + device.launch_us)
            clocks.append(MAX_CLOCK_MHZ)
            continue
        sm = _Dealer(plan, kernel, problem, scalars, work, its.ctas_per_sm, device)
        cycles = sm.clocks()
        mhz = _clock(work, cycles, device)
        nbytes = sum(its.dram_read.values()) + sum(its.dram_written.values())
        memory = nbytes / device.hbm_bytes_per_second * 1e6
        times.append(_rounded(cycles / mhz, memory) + device.launch_us)
        clocks.append(mhz)
    return Predicted(sum(times), tuple(times), min(clocks), bounds)


def _rounded(a: float, b: float) -> float:
    return float((a**ROUNDING + b**ROUNDING) ** (1 / ROUNDING))


def _clock(work: Work, cycles: float, device: Device) -> float:
    """MHz that the power limit leaves."""
    busy = 0.0
    for key, n in work.total.items():
        if key[0] == "flops":
            eight = DTYPE_BYTES[key[2]] == 1
            rate = device.wgmma_flops * (2 if eight else 1)
            busy += n / rate * (EIGHT_BIT_POWER if eight else 1.0)
    share = busy / (device.sms * cycles) if cycles else 0.0
    return min(MAX_CLOCK_MHZ, POWER_CLOCK_MHZ * (POWER_SHARE / share) ** (1 / 3)) if share else MAX_CLOCK_MHZ


# one kernel -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Line:
    """Clocks of a unit of work: `start` once for a CTA, `each` for every tile, and `slope` for every operation (or exponential)."""

    start: float
    each: float
    slope: float

    def of(self, tiles: Floats, work: Floats) -> Floats:
        return np.asarray(self.start + self.each * tiles + self.slope * work)


@dataclass(frozen=True)
class _Dealer:
    plan: Plan
    kernel: KernelPlan
    problem: Problem
    scalars: Mapping[str, int]
    work: Work
    fit: int
    device: Device

    def clocks(self) -> float:
        """Of the busiest SM."""
        done = _amount(self.work)
        walks = self._walks()
        ctas = self.scalars["n_ctas"]
        if walks:
            line = self._walking()
            if self.work.claimed:
                return line.start + _dealt(line.each + line.slope * done, self.device.sms)
            mine = np.arange(ctas)
            tiles = np.maximum(-(-(self.scalars["total"] - mine) // ctas), 0).astype(np.float64)
            return float(line.of(tiles, done).max())
        side_by_side = min(self.fit, max(1, -(-ctas // self.device.sms)))
        line = self._lone(min(side_by_side, MOST_CTAS))
        crowd = max(1.0, side_by_side / MOST_CTAS)
        return _dealt(line.of(np.zeros_like(done), done) * crowd, self.device.sms * side_by_side)

    def _walks(self) -> bool:
        """A CTA takes tile after tile."""
        steps = [s for r in self.kernel.roles for s in walk(r.body)]
        return any(isinstance(s, Forever) or isinstance(s, Loop) and s.var == "tile" for s in steps)

    def _blocks(self) -> tuple[int, int]:
        """Key blocks of the two small problems."""
        longest = max(1, -(-self.problem.sk // self.plan.schedule.tile_kv))
        return max(1, min(FEW_BLOCKS, longest // 2)), min(MOST_BLOCKS, longest)

    def _walking(self) -> _Line:
        few, many = self._blocks()
        one, three = (self._run(many, tiles=t) for t in (1, TILES))
        long = (three[0] - one[0]) / (TILES - 1), (three[1] - one[1]) / (TILES - 1)
        slope = 0.0
        if few != many:
            less = [self._run(few, tiles=t) for t in (1, TILES)]
            short = (less[1][0] - less[0][0]) / (TILES - 1), (less[1][1] - less[0][1]) / (TILES - 1)
            slope = (long[0] - short[0]) / (long[1] - short[1])
        each = long[0] - slope * long[1]
        return _Line(one[0] - long[0], each, slope)

    def _lone(self, ctas: int) -> _Line:
        few, many = self._blocks()
        if self.plan.schedule.loop_order == "kv_outer" or self.plan.schedule.parallelism == "batch_heads":
            longest = -(-self.problem.sq // self.plan.schedule.tile_q)
            short, long = (self._run(few, rows=min(rows, longest), ctas=ctas) for rows in ROWS_OF_TILES)
        else:
            short, long = (self._run(n, ctas=ctas) for n in (few, many))
        if long[1] == short[1]:
            return _Line(0.0 if long[1] else long[0], 0.0, long[0] / long[1] if long[1] else 0.0)
        slope = (long[0] - short[0]) / (long[1] - short[1])
        return _Line(long[0] - slope * long[1], 0.0, slope)

    def _run(self, blocks: int, *, tiles: int = 1, rows: int = 1, ctas: int = 1) -> tuple[float, float]:
        """(clocks, work of a CTA) of a problem with so many key blocks, tiles for a persistent CTA, query tiles of a head, CTAs on the SM."""
        s, heads = self.plan.schedule, tiles * ctas
        small = Problem(1, rows * s.tile_q, blocks * s.tile_kv, heads, heads)
        launch = self.plan.bind(small, contiguous(self.plan.attention, small, s.v_transposed), 1)
        bound = next(k for k in launch.kernels if k.name == self.kernel.name)
        scalars = {f: getattr(small, f) for f in ("batch", "sq", "sk", "hq", "hkv")} | scalar_env(self.kernel, bound)
        found: Replayed = replay(self.kernel, scalars, range(min(ctas, scalars["n_ctas"])))
        return found.clocks, float(_amount(tally(self.kernel, scalars)).sum()) / ctas


def _amount(work: Work) -> Floats:
    """What a unit's time grows with: its operations, or exponentials where it has none."""
    flops = [n.astype(np.float64) for key, n in work.units.items() if key[0] == "flops"]
    if flops:
        return np.asarray(sum(flops))
    exps = work.units.get(("exponentials",))
    return np.zeros(1) if exps is None else exps.astype(np.float64)


def _dealt(clocks: Floats, slots: int) -> float:
    """The end of the last slot, where each unit in order goes to the slot that is free first."""
    if len(clocks) <= slots:
        return float(clocks.max()) if len(clocks) else 0.0
    longest = float(clocks.max())
    if longest == float(clocks.min()):
        return longest * math.ceil(len(clocks) / slots)
    if len(clocks) > MOST_UNITS:
        return float(clocks.sum()) / slots + longest * (1 - 1 / slots)
    free = [0.0] * slots
    for t in clocks.tolist():
        heapq.heapreplace(free, free[0] + t)
    return max(free)
