"""A plan explained: its loop nest, where everything lies in shared memory, who holds which registers, and what binds it on a problem."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..plan import Plan, Problem
from ..plan.kernel import KernelPlan
from ..plan.registers import launch_registers
from ..plan.text import loop_nest
from ..report import CompileReport
from .answers import answers, converted
from .machine import H200, Device
from .model import Predicted, predict_time
from .roofline import Cost, KernelCost, cost

if TYPE_CHECKING:
    from .shares import Measured


def explain(
    plan: Plan,
    report: CompileReport | None = None,
    problem: Problem | None = None,
    device: Device = H200,
    measured: Measured | None = None,
) -> dict[str, Any]:
    """Plain JSON values. Keys of the answer

    plan, attention, schedule   the id and the two values
    kernels                     name, threads, grid (an expression of the call's sizes), shared-memory bytes, and the target's limit
    loop_nest                   lines of text, indented; every kernel's begin with its name where there are several
    shared_memory               tiles and mbarriers by offset: kernel, name, kind, offset, bytes (of all stages), stages, what a slot is
    named_barriers              the hardware barriers beside: kernel, name, ids, threads that take part in each
    registers                   by role: threads, the planned limit a thread, the tiles held in registers, and what the compiled code
                                uses (None without `report`, or where its SASS was not read)
    answers                     question → sentences, from the program
    and with a `problem`
    problem, device             its sizes; the machine's name, SMs and clock
    times_us                    lower bounds in µs by resource: hbm, tensor, exp, parallelism, latency (summed over kernels)
    binds                       one of those
    bound_us                    what no launch can beat under the model
    predicted_us                what a launch takes, by `model.predict_time`; by kernel: predicted_kernels_us
    counts                      by kernel: products, exponentials, bytes into and out of the SMs and of DRAM by tensor, CTAs
    and with `measured`
    measured                    the time on that problem and what is saved without softmax, loads, P·V or idle SMs (`shares.Measured`)

    InputError for a problem that the plan cannot be launched on.
    """
    predicted = None if problem is None else predict_time(plan, problem, device, _registers(report))
    found = None if predicted is None else predicted.cost
    compiled = {k.name: k.registers_by_role for k in report.kernels} if report else {}
    several = len(plan.kernels) > 1
    return {
        "plan": plan.id,
        "attention": plan.attention.to_dict(),
        "schedule": plan.schedule.to_dict(),
        "kernels": [
            {
                "name": k.name,
                "threads": k.threads,
                "grid": str(k.grid),
                "shared_memory_bytes": k.smem_bytes,
                "shared_memory_limit": plan.target.smem_bytes,
            }
            for k in plan.kernels
        ],
        "loop_nest": [line for k in plan.kernels for line in ([f"{k.name}:"] if several else []) + loop_nest(k)],
        "shared_memory": [line for k in plan.kernels for line in shared_memory(k)],
        "named_barriers": [
            {"kernel": k.name, "name": b.name, "ids": list(range(b.first_id, b.first_id + b.count)), "threads": b.threads}
            for k in plan.kernels
            for b in k.nbars
        ],
        "registers": [line for k in plan.kernels for line in registers(k, compiled.get(k.name))],
        "answers": answers(plan, found.kernels if found else ()),
        **(_costs(predicted) if predicted else {}),
        **({"measured": measured.to_dict()} if measured else {}),
    }


def predict(plan: Plan, problem: Problem, report: CompileReport | None = None, device: Device = H200) -> Cost:
    """`roofline.cost` with the registers that the compiler gave each kernel, where they are known."""
    return cost(plan, problem, device, _registers(report))


def _registers(report: CompileReport | None) -> dict[str, int] | None:
    return {k.name: k.registers for k in report.kernels} if report else None


def sentence(found: Cost) -> str:
    """What binds, in one sentence."""
    times, bound = found.times_us, found.bound_us
    largest = {r: us(times[r]) for r in ("hbm", "tensor", "exp")}
    beside = f"hbm {largest['hbm']}, tensor {largest['tensor']}, exp {largest['exp']}"
    if found.binds == "parallelism":
        k = max(found.kernels, key=lambda k: k.bound_us)
        units = f"{k.units} {'tiles' if k.claimed else 'CTAs'} on {found.device.sms} SMs: the busiest has {k.busiest:.3g} times its share"
        return f"Parallelism binds: {units}, {us(times['parallelism'])} beside {beside}."
    if found.binds == "latency":
        return f"Latency binds: {times['latency']:.3g} µs to start {len(found.kernels)} kernel{'s' * (len(found.kernels) > 1)}, beside {beside}."
    word = {"hbm": "Memory", "tensor": "The tensor cores", "exp": "The exponential unit"}[found.binds]
    return f"{word} bind{'s' * (found.binds != 'tensor')}: {beside}; at least {us(bound)}."


def us(time: float) -> str:
    """Microseconds as text."""
    return f"{time:,.0f} µs" if time >= 1000 else f"{time:.3g} µs"


def _costs(predicted: Predicted) -> dict[str, Any]:
    found = predicted.cost
    p, d = found.problem, found.device
    return {
        "problem": {f: getattr(p, f) for f in ("batch", "sq", "sk", "hq", "hkv")},
        "device": {"name": d.name, "sms": d.sms, "clock_mhz": d.clock_mhz},
        "times_us": found.times_us,
        "binds": found.binds,
        "bound_us": found.bound_us,
        "predicted_us": predicted.time_us,
        "predicted_kernels_us": {k.name: t for k, t in zip(found.kernels, predicted.kernels_us)},
        "sentence": sentence(found),
        "counts": {k.name: counts(k) for k in found.kernels},
    }


def counts(k: KernelCost) -> dict[str, Any]:
    """One kernel's counts as plain JSON values; bytes by tensor, with their sum under "all"."""

    def by_tensor(of: dict[str, int]) -> dict[str, int]:
        return {**of, "all": sum(of.values())}

    return {
        "mma_flops": k.flops,
        "mma_instructions": k.instructions,
        "exponentials": k.exponentials,
        "sm_read_bytes": by_tensor(k.sm_read),
        "sm_written_bytes": by_tensor(k.sm_written),
        "dram_read_bytes": by_tensor(k.dram_read),
        "dram_written_bytes": by_tensor(k.dram_written),
        "ctas": k.ctas,
        "ctas_per_sm": k.ctas_per_sm,
        "ctas_limited_by": k.fits_by,
        "units": k.units,
        "busiest_sm": k.busiest,
        "times_us": k.times_us,
        "binds": k.binds,
    }


def shared_memory(kernel: KernelPlan) -> list[dict[str, Any]]:
    """The memory map of one CTA, by offset."""
    tiles = [
        {
            "kernel": kernel.name,
            "name": t.name,
            "kind": "tile",
            "offset": t.offset,
            "bytes": t.stages * t.tile_bytes,
            "stages": t.stages,
            "slot": f"{t.rows} × {t.cols} {t.dtype}, swizzle {t.swizzle}",
        }
        for t in kernel.smem
    ]
    barriers = [
        {
            "kernel": kernel.name,
            "name": b.name,
            "kind": "mbarrier",
            "offset": b.offset,
            "bytes": 8 * b.stages,
            "stages": b.stages,
            "slot": f"{b.arrivals} arrivals" + (f", {b.tx_bytes} bytes" if b.tx_bytes else ""),
        }
        for b in kernel.mbars
    ]
    return sorted(tiles + barriers, key=lambda line: int(str(line["offset"])))


def registers(kernel: KernelPlan, compiled: dict[str, int] | None = None) -> list[dict[str, Any]]:
    """32-bit registers a thread, by role. `planned`: the setmaxnreg of a role, or else what the launch leaves each thread."""
    return [
        {
            "kernel": kernel.name,
            "role": role.name,
            "threads": role.threads,
            "planned": role.registers or launch_registers(kernel.threads),
            "setmaxnreg": role.registers is not None,
            "tiles": {f.name: f.registers for f in role.frags if f.name not in converted(role)},
            "compiled": (compiled or {}).get(role.name),
        }
        for role in kernel.roles
    ]
