"""`run_bench`: schedules beside their peers on this GPU, verified, then measured as `timing.py` says.

The kernels are built ones on disk, so the machine with the GPU needs no compiler. Everything torch is behind `Lab`; the rest works
on tasks and a clock, whatever they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone

from ..attention import Attention
from ..errors import InputError
from ..plan.kernel import Problem
from ..plan.steps import DTYPE_BYTES
from .bench_inputs import KINDS, check_inputs
from .bench_lab import COPY_BYTES, GEMM_SIZE, Candidate, Doing, Lab, silent
from .bench_result import SCHEMA, BenchResult, BenchSpec, CaseResult, CaseSpec, Ceilings, Row, Timing
from .peers import PEERS
from .timing import SUSTAINED_ROUNDS, Clock, Reading, Sample, Task, burst, interval, sustained

METHOD = {
    "tflops": "4 * seqlen_q * seqlen_k * head_dim * heads * batch operations, halved for a causal mask, over the median time",
    "inputs": "the same tensors for every function of a case",
    "burst": "15 ms rest, one launch, then about 4 ms of back-to-back launches in one CUDA graph; functions in rotating order",
    "sustained": "0.07 s warm-up and 0.13 s measured per function and round; functions in rotating order",
    "copy": "the fastest of a memcpy and two elementwise kernels on 1 GiB, bytes read plus bytes written",
    "l2": "not flushed: a launch finds in L2 what the launch before it left, for every function alike",
    "interval": "order statistics of the rounds (binomial, exact coverage stated)",
    "verification": "a sample of rows and heads against float64 before timing; wrong functions are not timed",
}


# sizes and counts ---------------------------------------------------------------------------------------------------------

TOKENS, HIDDEN = 16384, 2048
HEAD_DIMS = (64, 128, 256)
PAPER_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
LADDER_HEADS = 16
LADDER = ((16, 1024), (16, 2048), (16, 4096), (4, 4096), (1, 16384))
"""(sequences, length): many heads, for which a CTA a head is enough, then 16384 tokens in all, for which it is not."""
GRIDS = ("paper", "ladder")
LATER_GRIDS = {"decode": "needs KV splits, which no schedule has yet"}


def grid_problems(grid: str, head_dim: int) -> tuple[Problem, ...]:
    """The sizes of a named grid. paper: 16384 tokens in all and a hidden size of 2048 (heads = KV heads = 2048 / head_dim). ladder: 16
    heads; see `LADDER`. InputError lists the grids."""
    if grid in LATER_GRIDS:
        raise InputError("--grid", f"{grid} {LATER_GRIDS[grid]}; grids: {', '.join(GRIDS)}")
    if grid == "ladder":
        return tuple(Problem(b, n, n, LADDER_HEADS, LADDER_HEADS) for b, n in LADDER)
    if grid != "paper":
        raise InputError("--grid", f"no grid {grid!r}; grids: {', '.join(GRIDS)}")
    heads = max(1, HIDDEN // head_dim)
    return tuple(Problem(TOKENS // n, n, n, heads, heads) for n in PAPER_LENGTHS)


def one_problem(head_dim: int) -> Problem:
    """What is timed where nothing is asked for: the longest of the paper's grid."""
    return grid_problems("paper", head_dim)[-1]


def flops(attention: Attention, problem: Problem, pairs: int | None = None) -> int:
    """Operations of Q·Kᵀ and P·V, 2 per multiply-add, over `pairs` (query, key) pairs a head. None: the count of the FlashAttention
    papers: all pairs, or half of them under a causal mask."""
    per_pair = 2 * (attention.head_dim + attention.dv) * problem.hq * problem.batch
    if pairs is not None:
        return per_pair * pairs
    whole = per_pair * problem.sq * problem.sk
    return whole // 2 if attention.causal else whole


def visible_pairs(attention: Attention, problem: Problem) -> int:
    """(query, key) pairs of one head that the mask lets through; a causal mask is aligned bottom-right."""
    sq, sk = problem.sq, problem.sk
    if attention.mask == "full":
        return sq * sk
    if attention.mask == "causal":
        return sq * sk - sq * (sq - 1) // 2 if sq <= sk else sk * (sk + 1) // 2
    raise InputError("mask", f"bench counts the operations of full and causal masks, not of {attention.mask!r}")


def compulsory_bytes(attention: Attention, problem: Problem) -> int:
    """q, k and v read once, out and lse (float32) written once."""
    b, q_rows, k_rows = problem.batch, problem.sq * problem.hq, problem.sk * problem.hkv
    size = {t: DTYPE_BYTES[attention.dtype_of(t)] for t in ("q", "k", "v", "out")}
    of_q, of_k, of_v = q_rows * attention.head_dim, k_rows * attention.head_dim, k_rows * attention.dv
    read = of_q * size["q"] + of_k * size["k"] + of_v * size["v"]
    return b * (read + q_rows * (attention.dv * size["out"] + 4))


# measuring ----------------------------------------------------------------------------------------------------------------


def measure_case(
    case: CaseSpec, candidates: Sequence[Candidate], clock: Clock, ceilings: Ceilings, spec: BenchSpec, read: Callable[[], Reading]
) -> CaseResult:
    """Time the candidates that have a task; the rows keep the candidates' order."""
    timed = [i for i, c in enumerate(candidates) if c.task is not None]
    tasks = [c.task for c in candidates if c.task is not None]
    rows = [c.row for c in candidates]
    before = read()
    if tasks:
        gemm, copy = ceilings.gemm_tflops.median, ceilings.copy_tbs.median
        samples = burst(tasks, clock, spec.rounds)
        timings = _timings(case, [rows[i] for i in timed], tasks, samples, gemm, copy)
        for i, t in zip(timed, timings):
            rows[i] = replace(rows[i], burst=t)
        if spec.sustained and ceilings.gemm_tflops_sustained and ceilings.copy_tbs_sustained:
            gemm, copy = ceilings.gemm_tflops_sustained.median, ceilings.copy_tbs_sustained.median
            samples = sustained(tasks, clock, min(spec.rounds, SUSTAINED_ROUNDS), [t.ms.median for t in timings])
            for i, t in zip(timed, _timings(case, [rows[i] for i in timed], tasks, samples, gemm, copy)):
                rows[i] = replace(rows[i], sustained=t)
    counted = flops(case.attention, case.problem)
    visible = flops(case.attention, case.problem, visible_pairs(case.attention, case.problem))
    nbytes = compulsory_bytes(case.attention, case.problem)
    return CaseResult(case.attention, case.problem, counted, visible, nbytes, before, read(), tuple(rows))


def _timings(
    case: CaseSpec, rows: Sequence[Row], tasks: Sequence[Task], samples: Sequence[Sequence[Sample]], gemm: float, copy: float
) -> list[Timing]:
    counted = flops(case.attention, case.problem)
    visible = flops(case.attention, case.problem, visible_pairs(case.attention, case.problem))
    compulsory = compulsory_bytes(case.attention, case.problem)
    ms = [interval([s.ms for s in of]) for of in samples]
    peer_places = [i for i, row in enumerate(rows) if row.kind == "peer"]
    best = min(peer_places, key=lambda i: ms[i].median, default=None)
    timings = []
    for i, (row, task, of) in enumerate(zip(rows, tasks, samples)):
        ratio = None
        nbytes = compulsory if row.bytes is None else row.bytes
        if row.kind == "schedule" and row.part != "quantise" and best is not None:
            ratio = interval([theirs.ms / mine.ms for theirs, mine in zip(samples[best], of)])
        clocks = [s.sm_mhz for s in of if s.sm_mhz is not None]
        timings.append(
            Timing(
                ms=ms[i],
                tflops=ms[i].map(lambda t: counted / t / 1e9),
                tflops_visible=visible / ms[i].median / 1e9,
                ratio=ratio,
                best_peer=None if ratio is None or best is None else rows[best].function,
                gemm_share=counted / ms[i].median / 1e9 / gemm,
                copy_share=nbytes / ms[i].median / 1e9 / copy,
                sm_mhz=interval(clocks).median if clocks else None,
                samples_ms=tuple(s.ms for s in of),
                launches=task.launches,
            )
        )
    return timings


def measure_ceilings(gemm: Task, copies: Sequence[Task], clock: Clock, spec: BenchSpec) -> Ceilings:
    """TFLOP/s of the matrix product and TB/s of the fastest of the copies, as the functions are measured."""
    tasks = [gemm, *copies]
    gemm_ms, *copy_ms = (interval([s.ms for s in of]) for of in burst(tasks, clock, spec.rounds))
    best = min(range(len(copies)), key=lambda i: copy_ms[i].median)
    rates = {task.name: _copy_tbs(ms.median) for task, ms in zip(copies, copy_ms)}
    found = [gemm_ms.map(_gemm_tflops), copy_ms[best].map(_copy_tbs)]
    if not spec.sustained:
        return Ceilings(found[0], found[1], None, None, rates)
    loaded = sustained([gemm, copies[best]], clock, min(spec.rounds, SUSTAINED_ROUNDS), [gemm_ms.median, copy_ms[best].median])
    gemm_ms, best_ms = (interval([s.ms for s in of]) for of in loaded)
    return Ceilings(found[0], found[1], gemm_ms.map(_gemm_tflops), best_ms.map(_copy_tbs), rates)


def _gemm_tflops(ms: float) -> float:
    return 2 * GEMM_SIZE**3 / ms / 1e9


def _copy_tbs(ms: float) -> float:
    """Bytes read plus bytes written."""
    return 2 * COPY_BYTES / ms / 1e9


# the run ------------------------------------------------------------------------------------------------------------------


def check_spec(spec: BenchSpec) -> None:
    """InputError for a spec that cannot be measured."""
    if spec.rounds < 1:
        raise InputError("--rounds", f"{spec.rounds}; at least 1, and at least 6 for a 95 % interval")
    check_peers(spec.peers)
    if not spec.cases:
        raise InputError("--shape", "nothing to measure")
    for case in spec.cases:
        p = case.problem
        if min(p.batch, p.sq, p.sk, p.hq, p.hkv) < 1:
            raise InputError("--shape", f"{p}: every size must be at least 1 to be timed")
        if p.hq % p.hkv:
            near = [n for n in range(1, p.hq + 1) if p.hq % n == 0]
            raise InputError("--shape", f"{p}: {p.hq} query heads are not a multiple of {p.hkv} KV heads; legal KV heads: {near}")
        visible_pairs(case.attention, p)
        check_inputs(spec.inputs, case.attention, p)


def check_peers(names: Sequence[str]) -> None:
    """InputError for a name that no peer has."""
    for name in names:
        if name not in PEERS:
            raise InputError("--vs", f"no peer {name!r}; peers: {', '.join(PEERS)}, none")


def run_bench(spec: BenchSpec, on_case: Callable[[CaseResult], None] | None = None, doing: Doing = silent) -> BenchResult:
    """Verify and measure every case; `on_case` is called with each as it is done, `doing` before all that could hang.

    Raises InputError for an unusable spec or built kernel, LaunchError where there is no GPU or no torch, or if a kernel ends the
    GPU context. A function that is wrong, absent or refuses is a row that says so. `bench_watch.run_watched` does the same in a
    process of its own.
    """
    check_spec(spec)
    began, started = time.monotonic(), datetime.now(timezone.utc)
    lab = Lab(spec, doing)
    ceilings = measure_ceilings(*lab.ceiling_tasks(), lab.clock, spec)
    cases = []
    for number, case in enumerate(spec.cases):
        with lab.case(number):
            found = measure_case(case, lab.candidates(case), lab.clock, ceilings, spec, lab.sensors.read)
        cases.append(found)
        if on_case is not None:
            on_case(found)
    return BenchResult(
        schema=SCHEMA,
        started=started.isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - began, 1),
        machine=lab.machine(),
        versions=lab.versions(),
        method=METHOD | {"inputs": f"{KINDS[spec.inputs]}; {METHOD['inputs']}"},
        rounds=spec.rounds,
        seed=spec.seed,
        ceilings=ceilings,
        cases=tuple(cases),
        inputs=spec.inputs,
    )
