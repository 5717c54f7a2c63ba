"""Runs a plan's program of steps on the CPU: the same program that the emitter prints, on a model of the hardware that is as unkind
as the rules allow.

Roles run in a seeded random order. Asynchronous work lands as late as it may: TMA data when its barrier completes, WGMMA results
at the MmaWait that names them, cp.async data at the CpWait of the warp that copied it. What may not be read is NaN: slots that are
empty, freed or being filled, registers of a product in flight. So a missing wait gives NaN, or a `SimulatedDeadlock` that names who
stands where; a barrier that is arrived at too often, or an access out of bounds, is a `SimulatedFault`.

Numbers are the GPU's up to the order of summation: products of the rounded operands summed in float32 (e4m3: as `numeric.tensor_core`
says), ex2 in float32, P and O rounded to their types. Register layouts, swizzles and clocks are not modelled, and a role instance moves as one: what goes wrong only
between the warps of one warpgroup is for the proof to find.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...attention import Attention
from ...descales import Descales, as_arrays, forms
from ...errors import InputError
from ...plan import plan as make_plan
from ...plan.kernel import KernelLaunch, KernelPlan, Launch, Plan, Problem, Workspace, scalar_env
from ...plan.quantised import idle
from ...schedule import Schedule
from ..blocks import problem_of
from ..numeric import DTYPES, F32, Array
from .engine import Engine
from .machine import GlobalMemory, SimulatedDeadlock, SimulatedFault

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["SimulatedDeadlock", "SimulatedFault", "Simulation", "simulate", "simulate_sample"]

ONE_TILE_EACH = 1 << 30
"""More SMs than there are tiles: a persistent CTA then owns one tile."""


@dataclass(frozen=True)
class Simulation:
    """out (batch, seqlen_q, heads, head_dim_v), lse (batch, heads, seqlen_q) float32, and `rows` (batch, heads, seqlen_q): which
    rows were simulated; the others are NaN."""

    out: Array
    lse: F32
    rows: npt.NDArray[np.bool_]


def simulate(
    attention: Attention,
    schedule: Schedule,
    q: Array,
    k: Array,
    v: Array,
    *,
    seed: int = 0,
    plan: Plan | None = None,
    num_sms: int = 2,
    exact_sums: bool = False,
    **descales: Unpack[Descales],
) -> tuple[Array, F32]:
    """The output of the kernel that `plan(attention, schedule)` describes, run step by step on the CPU.

    q (batch, seqlen_q, heads, head_dim), k (batch, seqlen_k, kv_heads, head_dim), v (batch, seqlen_k, kv_heads, head_dim_v): NumPy
    arrays of the attention's dtype (ml_dtypes for bf16 and e4m3; v of its `value_dtype`), any strides; with the schedule's v_transposed, v (batch, kv_heads,
    head_dim_v, seqlen_k). `q_descale`, `k_descale`, `v_descale` (8-bit types): numbers, or float32 arrays as the schedule's scale_granularity
    says (see `Kernel`). Returns out (batch, seqlen_q, heads, head_dim_v) in the output dtype and lse (batch, heads, seqlen_q) in float32.

    `seed` chooses the interleaving; a right plan gives the same bits for every seed. `num_sms` CTAs run side by side, and make up
    the grid of a persistent kernel: with few of them each owns several tiles. `plan`: run this plan instead. `exact_sums`: the tensor
    core's e4m3 sums are cut term by term, as on the GPU, and not only where a product of depth 32 ends: what to predict errors of long
    sums with, and many times slower.

    A block of 128 × 128 takes about 0.4 ms with WGMMA, four times that with mma.sync and its eight warps; so 2048² of one head takes
    0.1 to 0.5 s. For longer sequences see `simulate_sample`.

    Raises InputError for tensors that do not fit the attention, SimulatedDeadlock and SimulatedFault for a plan that is wrong.
    """
    run = _run(
        attention, schedule, q, k, v, seed=seed, plan=plan, num_sms=num_sms, ctas=None, exact_sums=exact_sums, descales=descales
    )
    return run.out, run.lse


def simulate_sample(
    attention: Attention,
    schedule: Schedule,
    q: Array,
    k: Array,
    v: Array,
    *,
    seed: int = 0,
    plan: Plan | None = None,
    ctas: int = 8,
    exact_sums: bool = False,
    **descales: Unpack[Descales],
) -> Simulation:
    """As `simulate`, for `ctas` CTAs only, chosen by the seed: the way to check sequences above 2048 rows.

    Persistent kernels are bound to as many SMs as there are tiles, so that a CTA is one tile; under "batch_heads" it is one head.
    """
    return _run(
        attention,
        schedule,
        q,
        k,
        v,
        seed=seed,
        plan=plan,
        num_sms=ONE_TILE_EACH,
        ctas=ctas,
        exact_sums=exact_sums,
        descales=descales,
    )


def _run(
    attention: Attention,
    schedule: Schedule,
    q: Array,
    k: Array,
    v: Array,
    *,
    seed: int,
    plan: Plan | None,
    num_sms: int,
    ctas: int | None,
    exact_sums: bool,
    descales: Descales,
) -> Simulation:
    problem = problem_of(attention, q, k, v, schedule.v_transposed)
    for name, x in (("q", q), ("k", k), ("v", v)):
        wanted = attention.dtype_of(name)
        if x.dtype != DTYPES[wanted]:
            raise InputError(name, f"is {x.dtype}; the attention takes {wanted} ({DTYPES[wanted]})")
    for name, count in (("num_sms", num_sms), ("ctas", 1 if ctas is None else ctas)):
        if count < 1:
            raise InputError(name, f"is {count}; needs at least 1")
    scales = as_arrays(attention, descales, forms(schedule, problem))
    scales = {n: x for n, x in scales.items() if x.size}  # of no block: a null pointer, as on a GPU
    if schedule.v_transposed:
        v = v.transpose(0, 3, 1, 2)
    if plan is None:
        plan = make_plan(attention, schedule)
    out = np.full((problem.batch, problem.hq, problem.sq, attention.dv), np.nan, DTYPES[attention.output_dtype])
    lse = np.full((problem.batch, problem.hq, problem.sq), np.nan, np.float32)
    rows: npt.NDArray[np.bool_] = np.zeros(lse.shape, bool)
    if not problem.empty:
        launch = plan.bind(problem, _contiguous_strides(problem, attention), num_sms)
        memory = GlobalMemory(
            _inputs(q, k, v),
            {"out": out, "lse": lse},
            _counters(plan, launch),
            spaces=_spaces(plan.workspaces, problem),
            dtypes={w.name: w.dtype for w in plan.workspaces},
            descales=scales,
            exact_sums=exact_sums,
        )
        for kernel, bound in zip(plan.kernels, launch.kernels):
            whole = schedule.precision is not None and kernel.name != "attention"  # every CTA reads what all of them leave
            _run_kernel(kernel, bound, memory, seed, num_sms, None if whole else ctas)
        if ctas is None:
            _check_left_zero(plan, memory)
        rows = memory.written["out"] & memory.written["lse"]
    return Simulation(out.transpose(0, 2, 1, 3), lse, rows)


def simulate_outputs(plan: Plan, q: Array, k: Array, v: Array, *, seed: int = 0) -> tuple[Problem, dict[str, Array]]:
    """Run a plan that only quantises: the problem, and what the plan leaves, (batch, heads, rows, cols) float32; NaN where nothing was
    written. Raises as `simulate` does."""
    a = plan.attention
    problem = problem_of(a, q, k, v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype != DTYPES[a.dtype]:
            raise InputError(name, f"is {x.dtype}; the attention takes {a.dtype} ({DTYPES[a.dtype]})")
    memory = GlobalMemory(
        _inputs(q, k, v),
        {},
        {},
        spaces=_spaces((*plan.workspaces, *plan.outputs), problem),
        dtypes={w.name: w.dtype for w in (*plan.workspaces, *plan.outputs)},
    )
    if not idle(plan, problem):
        launch = plan.bind(problem, _contiguous_strides(problem, a), num_sms=2)
        for kernel, bound in zip(plan.kernels, launch.kernels):
            _run_kernel(kernel, bound, memory, seed, 2, None)
    return problem, {w.name: memory.spaces[w.name] for w in plan.outputs}


def _inputs(q: Array, k: Array, v: Array) -> dict[str, Array]:
    """Float32 copies (batch, heads, seq, dim)."""
    return {n: np.ascontiguousarray(x.transpose(0, 2, 1, 3), np.float32) for n, x in (("q", q), ("k", k), ("v", v))}


def _run_kernel(
    kernel: KernelPlan, launch: KernelLaunch, memory: GlobalMemory, seed: int, num_sms: int, sample: int | None
) -> None:
    ctas: range | list[int] = range(launch.grid)
    if sample is not None and sample < launch.grid:
        ctas = sorted(random.Random(seed).sample(ctas, sample))
    resident = min(num_sms if sample is None else 2, len(ctas))
    Engine(kernel, scalar_env(kernel, launch), memory, ctas, resident=resident, seed=seed).run()


def _contiguous_strides(problem: Problem, attention: Attention) -> dict[str, tuple[int, int, int]]:
    """Of the tensors the simulator works on, whatever those of the caller are."""
    sizes = {
        "q": (problem.sq, problem.hq, attention.head_dim),
        "k": (problem.sk, problem.hkv, attention.head_dim),
        "v": (problem.sk, problem.hkv, attention.dv),
        "out": (problem.sq, problem.hq, attention.dv),
    }
    return {name: (seq * heads * dim, heads * dim, dim) for name, (seq, heads, dim) in sizes.items()}


def _counters(plan: Plan, launch: Launch) -> dict[str, npt.NDArray[np.int64]]:
    counters = {w.name for w in plan.workspaces if w.dtype == "i32"}
    return {name: np.zeros(size // 4, np.int64) for name, size, _ in launch.workspaces if name in counters}


def _spaces(wanted: tuple[Workspace, ...], problem: Problem) -> dict[str, npt.NDArray[Any]]:
    """Workspaces of numbers."""
    env = {f: getattr(problem, f) for f in ("batch", "sq", "sk", "hq", "hkv")}
    return {w.name: np.full([x.eval(env) for x in w.shape], np.nan, np.float32) for w in wanted if w.dtype != "i32"}


def _check_left_zero(plan: Plan, memory: GlobalMemory) -> None:
    for space in plan.workspaces:
        if space.zeroed and memory.counters[space.name].any():
            left = memory.counters[space.name].tolist()
            raise SimulatedFault(f"workspace {space.name} is left at {left}; the next launch needs it at 0")
