"""The verbs of the Python interface: `compile`, `simulate`, `reference`. Imported at first use, so that `import fagen` stays quick."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from . import oracle
from .attention import Attention
from .compile import build
from .descales import Descales
from .emit import emit
from .launch import Kernel
from .plan import plan
from .schedule import Schedule

Array = npt.NDArray[Any]


def compile(
    attention: Attention, schedule: Schedule, *, debug: bool = False, trace: bool = False, allow_spill_bytes: int = 0
) -> Kernel:
    """A callable kernel: plan, emit and compile (by NVRTC, through the disk cache). Needs no GPU before it is called.

    `debug`: every wait is bounded; one that runs out traps and leaves a record of who waited for what. `trace`: role instances note when
    they come from one step to the next (`Kernel.trace_words`, read by `fagen.explore.trace`). `allow_spill_bytes`: spills tolerated per
    thread, for schedules that are being explored.

    The kernel has `.plan`, `.source` (the CUDA text), `.cubin` and `.report`. Raises ScheduleError where the pair is not legal,
    CompileError where the compiler's result breaks a promise of the plan, or there is no compiler.
    """
    planned = plan(attention, schedule, debug=debug, trace=trace)
    built = build(planned, emit(planned), allow_spill_bytes=allow_spill_bytes)
    return Kernel(built.plan, built.source.text, built.cubin, built.report)


def simulate(
    attention: Attention,
    schedule: Schedule,
    q: Array,
    k: Array,
    v: Array,
    *,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    seed: int = 0,
) -> tuple[Array, Array]:
    """What the kernel of this pair computes, step by step on the CPU: for tests and for reading, not for speed.

    q (batch, seqlen_q, heads, head_dim), k (batch, seqlen_k, kv_heads, head_dim), v (batch, seqlen_k, kv_heads, head_dim_v), or
    (batch, kv_heads, head_dim_v, seqlen_k) where the schedule says v_transposed: NumPy arrays of the attention's dtype (of ml_dtypes
    for bf16 and e4m3; with int8 v is e4m3, or as `v_dtype` says). Descales (8-bit types): numbers or float32 arrays, as `Kernel` takes them; None: 1. Returns out (batch, seqlen_q, heads,
    head_dim_v) and lse (batch, heads, seqlen_q), float32. `seed` chooses the order in which warps and copies get their turns; a right
    kernel gives the same bits for every one. A 128 × 128 tile takes about 1 ms.

    Raises ScheduleError, InputError naming the tensor, LaunchError for a plan that hangs or breaks a rule of the hardware.
    """
    q, k, v = (np.asarray(x) for x in (q, k, v))
    descales: Descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    return oracle.simulate(attention, schedule, q, k, v, seed=seed, **descales)


def reference(
    attention: Attention, q: Array, k: Array, v: Array, *, q_descale: Any = None, k_descale: Any = None, v_descale: Any = None
) -> tuple[Array, Array]:
    """softmax(scale · Q Kᵀ + mask) V in float64, on the inputs as they are.

    Shapes as in `simulate`, v never transposed, any real dtype. Descales: numbers, float32 arrays (batch, kv_heads), or one for each row:
    q's (batch, heads, seqlen_q), k's and v's (batch, kv_heads, seqlen_k). Returns out (batch, seqlen_q, heads, head_dim_v) and lse
    (batch, heads, seqlen_q), the natural logarithm; a row that sees no key has out 0 and lse −inf. Raises InputError naming the tensor.
    """
    descales: Descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    return oracle.reference(attention, np.asarray(q), np.asarray(k), np.asarray(v), **descales)
