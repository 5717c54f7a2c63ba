"""What a plan costs on one problem, and what binds it: the roofline, with counts from the program.

Times are lower bounds, each as if the others were free
  hbm          bytes from and to DRAM / the bandwidth that a copy reaches
  tensor, exp  operations / what all SMs do together
  parallelism  the same work on the busiest SM, as CTAs are in fact dealt out
  latency      starting the kernels, and the first load of each

What binds is the longest, but parallelism only where the busiest SM has `IDLE` times its even share: a few percent of a last wave is
what every kernel has.

DRAM bytes. What a CTA comes back to (a loop over other tensors lies between) is read again as far as the working set of all CTAs side by
side overflows L2; what several CTAs read (K and V of a head) as far as that of the heads in flight does, and then once for all CTAs of
the head that run side by side, since they go in step. Writes likewise. Intermediate tensors that fit L2 are not read from DRAM at all.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..attention import Attention
from ..plan.kernel import KernelPlan, Plan, Problem, scalar_env
from ..plan.registers import launch_registers
from ..plan.scales import shape
from ..plan.steps import DTYPE_BYTES, Loop, walk
from .machine import H200, Device
from .tally import Work, tally

RESOURCES = ("hbm", "tensor", "exp", "parallelism", "latency")
IDLE = 1.25
"""Parallelism binds from here on: the busiest SM's work over the average SM's."""
MOST_UNITS = 1 << 18
"""Above so many CTAs their dealing-out is estimated: the last one ends at most its own length late."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class KernelCost:
    """One kernel on one problem."""

    name: str
    flops: dict[str, int]
    """Of the matrix products as issued, padding included: "wgmma bf16" → operations (2 a multiply-add)."""
    instructions: dict[str, int]
    """HGMMA, QGMMA (a warpgroup's), HMMA (a warp's), as executed."""
    exponentials: int
    sm_read: dict[str, int]
    """Tensor → bytes from L2 or DRAM into the SMs."""
    sm_written: dict[str, int]
    dram_read: dict[str, int]
    dram_written: dict[str, int]
    ctas: int
    ctas_per_sm: int
    """That fit an SM side by side."""
    fits_by: str
    """What limits that: "shared memory", "registers", "threads" or "CTAs"."""
    units: int
    """Pieces of work that are dealt out: CTAs, or tiles that CTAs claim."""
    claimed: bool
    busiest: float
    """Work of the busiest SM over that of the average one."""
    times_us: dict[str, float]
    binds: str

    @property
    def bound_us(self) -> float:
        return max(self.times_us.values())


@dataclass(frozen=True)
class Cost:
    """All kernels of a plan, one after the other. `times_us` are sums over them."""

    problem: Problem
    device: Device
    kernels: tuple[KernelCost, ...]

    @property
    def times_us(self) -> dict[str, float]:
        return {r: sum(k.times_us[r] for k in self.kernels) for r in RESOURCES}

    @property
    def bound_us(self) -> float:
        """No launch can be faster under this model: each kernel takes at least the longest of its times."""
        return sum(k.bound_us for k in self.kernels)

    @property
    def binds(self) -> str:
        """What binds the kernels for the largest part of `bound_us`."""
        return max(RESOURCES, key=lambda r: sum(k.bound_us for k in self.kernels if k.binds == r))

    @property
    def sm_bytes(self) -> int:
        """Bytes into the SMs: the FlashAttention paper's Θ(N²·d²/M)."""
        return sum(sum(k.sm_read.values()) for k in self.kernels)

    @property
    def dram_bytes(self) -> int:
        return sum(sum(k.dram_read.values()) + sum(k.dram_written.values()) for k in self.kernels)

    @property
    def flops(self) -> int:
        return sum(sum(k.flops.values()) for k in self.kernels)

    @property
    def exponentials(self) -> int:
        return sum(k.exponentials for k in self.kernels)


def cost(plan: Plan, problem: Problem, device: Device = H200, registers: Mapping[str, int] | None = None) -> Cost:
    """`registers`: kernel → registers a thread at launch, as compiled; without it, the most that the plan allows.

    InputError for a problem that the plan cannot be launched on.
    """
    launch = plan.bind(problem, contiguous(plan.attention, problem, plan.schedule.v_transposed), device.sms)
    sizes = _tensor_bytes(plan, problem, launch.workspaces)
    kernels = []
    for kernel, bound in zip(plan.kernels, launch.kernels):
        scalars = {f: getattr(problem, f) for f in ("batch", "sq", "sk", "hq", "hkv")} | scalar_env(kernel, bound)
        given = (registers or {}).get(kernel.name)
        kernels.append(_kernel_cost(kernel, problem, tally(kernel, scalars), sizes, scalars, device, given))
    return Cost(problem, device, tuple(kernels))


def contiguous(attention: Attention, problem: Problem, v_transposed: bool = False) -> dict[str, tuple[int, int, int]]:
    """Strides over batch, seq and head of tensors (batch, seq, heads, head_dim); of a transposed V over batch, head_dim and head."""
    p, d, dv = problem, attention.head_dim, attention.dv
    sizes = {"q": (p.sq, p.hq, d), "k": (p.sk, p.hkv, d), "v": (p.sk, p.hkv, dv), "out": (p.sq, p.hq, dv)}
    strides = {name: (rows * heads * cols, heads * cols, cols) for name, (rows, heads, cols) in sizes.items()}
    return strides | ({"v": (p.hkv * dv * p.sk, p.sk, dv * p.sk)} if v_transposed else {})


# one kernel ---------------------------------------------------------------------------------------------------------------


def _kernel_cost(
    kernel: KernelPlan,
    problem: Problem,
    work: Work,
    sizes: Mapping[str, int],
    scalars: Mapping[str, int],
    device: Device,
    registers: int | None,
) -> KernelCost:
    fit, by = occupancy(kernel, device, registers)
    ctas = scalars["n_ctas"]
    read, written = _dram(kernel, problem, work, sizes, scalars, min(ctas, device.sms * fit), device)
    flops = {f"{k[1]} {k[2]}": n for k, n in work.total.items() if k[0] == "flops"}
    exponentials = work.total.get(("exponentials",), 0)
    tensor_s = sum(n / device.tensor_rate(k[1], k[2]) for k, n in work.total.items() if k[0] == "flops")
    exp_s = exponentials / device.exp_rate
    units = _unit_seconds(work, device)
    busiest_s, even_s = _busiest(units, device.sms), float(units.sum()) / device.sms
    times = {
        "hbm": (sum(read.values()) + sum(written.values())) / device.hbm_bytes_per_second,
        "tensor": tensor_s / device.sms,
        "exp": exp_s / device.sms,
        "parallelism": busiest_s,
        "latency": (device.launch_us + device.memory_latency_us) * 1e-6,
    }
    busiest = busiest_s / even_s if even_s else 1.0
    candidates = [r for r in RESOURCES if r != "parallelism" or busiest >= IDLE]
    return KernelCost(
        name=kernel.name,
        flops=flops,
        instructions={k[1]: n for k, n in work.total.items() if k[0] == "instructions"},
        exponentials=exponentials,
        sm_read={k[1]: n for k, n in work.total.items() if k[0] == "in"},
        sm_written={k[1]: n for k, n in work.total.items() if k[0] == "out"},
        dram_read=read,
        dram_written=written,
        ctas=ctas,
        ctas_per_sm=fit,
        fits_by=by,
        units=len(units),
        claimed=work.claimed,
        busiest=busiest,
        times_us={r: 1e6 * t for r, t in times.items()},
        binds=max(candidates, key=lambda r: times[r]),
    )


def occupancy(kernel: KernelPlan, device: Device, registers: int | None = None) -> tuple[int, str]:
    """CTAs that an SM holds at once, and what limits them."""
    a_thread = registers or launch_registers(kernel.threads, device.registers_per_sm)
    limits = {
        "shared memory": device.smem_per_sm // (kernel.smem_bytes + device.smem_reserved),
        "registers": device.registers_per_sm // (-(-a_thread // 8) * 8 * kernel.threads),
        "threads": device.threads_per_sm // kernel.threads,
        "CTAs": device.ctas_per_sm,
    }
    by = min(limits, key=lambda name: limits[name])
    return max(limits[by], 1), by


def _unit_seconds(work: Work, device: Device) -> Floats:
    """How long an SM's slower unit works on each CTA (or claimed tile)."""
    count = max((len(n) for n in work.units.values()), default=0)
    tensor, exp = np.zeros(count), np.zeros(count)
    for key, numbers in work.units.items():
        if key[0] == "flops":
            tensor += numbers / device.tensor_rate(key[1], key[2])
        elif key[0] == "exponentials":
            exp += numbers / device.exp_rate
    return np.maximum(tensor, exp)


def _busiest(seconds: Floats, sms: int) -> float:
    """The end of the last SM, where each unit in order goes to the SM that is free first."""
    if len(seconds) == 0:
        return 0.0
    longest = float(seconds.max())
    if len(seconds) <= sms:
        return longest
    if longest == float(seconds.min()):
        return longest * -(-len(seconds) // sms)
    if len(seconds) > MOST_UNITS:
        return float(seconds.sum()) / sms + longest * (1 - 1 / sms)
    free = [0.0] * sms
    for t in seconds.tolist():
        heapq.heapreplace(free, free[0] + t)
    return max(free)


# bytes --------------------------------------------------------------------------------------------------------------------


def _tensor_bytes(plan: Plan, problem: Problem, workspaces: tuple[tuple[str, int, bool], ...]) -> dict[str, int]:
    """Every tensor and workspace of the plan, whole."""
    a, p = plan.attention, problem
    q_rows, k_rows = p.batch * p.sq * p.hq, p.batch * p.sk * p.hkv
    size_in = {t: DTYPE_BYTES[a.dtype_of(t)] for t in ("q", "k", "v")}
    shapes = {n: shape(n, plan.schedule, p) for n in a.descales}
    scales = {n: DTYPE_BYTES["fp32"] * math.prod(s or ()) for n, s in shapes.items()}
    tensors = {
        "q": q_rows * a.head_dim * size_in["q"],
        "k": k_rows * a.head_dim * size_in["k"],
        "v": k_rows * a.dv * size_in["v"],
        "out": q_rows * a.dv * DTYPE_BYTES[a.output_dtype],
        "lse": q_rows * DTYPE_BYTES["fp32"],
    }
    return {**tensors, **scales, **{name: nbytes for name, nbytes, _ in workspaces}}


def _dram(
    kernel: KernelPlan,
    problem: Problem,
    work: Work,
    sizes: Mapping[str, int],
    scalars: Mapping[str, int],
    side_by_side: int,
    device: Device,
) -> tuple[dict[str, int], dict[str, int]]:
    """(tensor → bytes read, tensor → bytes written) of DRAM, as the module's head says."""
    units = max((len(n) for n in work.units.values()), default=1)
    walks = work.claimed or any(isinstance(s, Loop) and s.var == "tile" for r in kernel.roles for s in walk(r.body))
    heads = max(problem.batch * problem.hkv, 1)
    moved, first = work.touched, dict(work.first)
    if not walks:  # a CTA is of one head and touches no more than that head's part
        parts = {t: heads if t in ("k", "v") else problem.batch * problem.hq for _, t in moved}
        first = {k: min(n, units * sizes[k[1]] // parts[k[1]]) for k, n in first.items()}
    again = {k: work.again.get(k, 0) for k in moved}
    back = {k: n - first[k] - again[k] for k, n in moved.items()}

    # What CTAs come back to: each its part of every such tensor.
    own = sum({k[1]: first[k] for k in moved if back[k] > 0}.values()) / units
    miss_own, miss_again = (_overflow(x * side_by_side, device) for x in (own, work.again_at_once))
    # What CTAs share: the heads in flight, and how many CTAs of each go in step.
    per_head = max((scalars["total"] if walks else units) / heads, 1)
    in_flight = min(max(math.ceil(side_by_side / per_head), scalars.get("section_heads", 1)), heads)
    common = sum(sizes[k[1]] for k in moved if first[k] > sizes[k[1]]) / heads
    miss_common, in_step = _overflow(common * in_flight, device), max(side_by_side / in_flight, 1)

    out: dict[str, dict[str, int]] = {"in": {}, "out": {}}
    for key, n in moved.items():
        direction, tensor = key
        once = min(first[key], sizes[tensor])
        shared = once + miss_common * max(first[key] / in_step - once, 0)
        total = shared + back[key] * miss_own + again[key] * miss_again
        if direction == "in" and _intermediate(kernel, tensor, moved) and sizes[tensor] <= device.l2_usable:
            total = 0
        out[direction][tensor] = round(min(total, n))
    return out["in"], out["out"]


def _intermediate(kernel: KernelPlan, tensor: str, moved: Mapping[tuple[str, str], int]) -> bool:
    """Written by an earlier kernel of the plan."""
    return kernel.gmem_of(tensor).use == "workspace" and ("out", tensor) not in moved


def _overflow(working_set: float, device: Device) -> float:
    """The part of a working set that L2 does not hold."""
    return max(0.0, 1 - device.l2_usable / working_set) if working_set > 0 else 0.0
