"""A plan explained: its loop nest, where everything lies in shared memory, and who holds which registers."""

from __future__ import annotations

from typing import Any

from ..plan import Plan
from ..plan.kernel import KernelPlan
from ..plan.registers import launch_registers
from ..plan.text import loop_nest
from ..report import CompileReport


def explain(plan: Plan, report: CompileReport | None = None) -> dict[str, Any]:
    """Plain JSON values. Keys of the answer

    plan, attention, schedule   the id and the two values
    kernels                     name, threads, grid (an expression of the call's sizes), shared-memory bytes, and the target's limit
    loop_nest                   lines of text, indented; every kernel's begin with its name where there are several
    shared_memory               tiles and mbarriers by offset: kernel, name, kind, offset, bytes (of all stages), stages, what a slot is
    named_barriers              the hardware barriers beside: kernel, name, ids, threads that take part in each
    registers                   by role: threads, the planned limit a thread, the tiles held in registers, and what the compiled code
                                uses (None without `report`, or where its SASS was not read)
    """
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
            "tiles": {f.name: f.registers for f in role.frags},
            "compiled": (compiled or {}).get(role.name),
        }
        for role in kernel.roles
    ]
