"""The processes that compute the float64 reference: a pool of fresh interpreters with one BLAS thread each."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..attention import Attention
from ..errors import HostError, InputError, LaunchError
from ..host import available_bytes, cores
from ..oracle import CheckProblem, Verdict, check, compare, make_case, sample_rows, simulate, simulate_sample
from ..oracle.numeric import DTYPES, Array
from ..oracle.yardstick import yardstick
from ..schedule import Schedule
from .items import Item, with_reason

FEW = 16
"""Cases below which starting processes takes longer than the work."""
EXACT_SCORES = 1 << 16
"""Scores of a problem up to which 8-bit products are simulated term by term, as the bounds assume; single values show the difference."""
JUDGE_BYTES = 1 << 30
"""Memory that a process may come to need; 0.85 GiB is what the largest of the standard cases takes, at head_dim 256."""
_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def case_bytes(attention: Attention, schedule: Schedule, problem: CheckProblem) -> int:
    """About what a case takes of memory, as measured: 8 bytes for an element of q (in float32, in its type, and out) and 21 for one of k (and v,
    and both in float64); with `precision` 30 and 60; 9 for a score where scores have a workspace."""
    p, a = problem, attention
    of_q, of_k = (p.batch * n * heads * a.head_dim for n, heads in ((p.sq, p.hq), (p.sk, p.hkv)))
    scores = 0 if schedule.softmax == "fused" else p.batch * p.hq * p.sq * p.sk
    return (8 * of_q + 21 * of_k if schedule.precision is None else 30 * of_q + 60 * of_k) + 9 * scores


def room_for(items: Sequence[Item], at_once: int = 1) -> int:
    """What the largest case takes of memory. InputError if there is not room for `at_once` such: the system would kill a process without
    a word."""
    sizes = {case_bytes(i.attention, i.schedule, p): f"{p} with {i.name}" for i in items for p in i.problems}
    largest, free = max(sizes, default=0), available_bytes() // at_once
    if largest > free:
        need, have = (f"{x * at_once / 2**30:.1f} GiB" for x in (largest, free))
        fits = f"sizes {largest / free:.1f} times smaller fit"
        raise InputError(
            "--shape", f"{sizes[largest]} takes about {need} of memory, tensors and references; {have} are free: {fits}"
        )
    return largest


@contextlib.contextmanager
def pool(cases: int, largest: int = 0) -> Iterator[Executor]:
    """An executor for `cases` judgements: a process for each core that this one may use, as far as there is memory for them, each of which
    takes `largest` bytes at most.

    Leaving it early (an error, Ctrl-C) drops what has not begun. HostError if one of the processes ends before its work.
    """
    workers = min(cores(), cases, max(1, available_bytes() // max(largest, JUDGE_BYTES)))
    few = cases < FEW or workers < 2
    # Workers start one by one as work comes, and read these when they import NumPy.
    with _environment({} if few else dict.fromkeys(_ONE_THREAD, "1")):
        executor = ThreadPoolExecutor(1) if few else _Judges(workers, mp_context=multiprocessing.get_context("spawn"))
        try:
            yield executor
        except BrokenExecutor as e:
            raise HostError(
                f"one of the {workers} processes that compute references ended before its work; if it printed no reason, the system killed it, most "
                "often for want of memory"
            ) from e
        finally:
            executor.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {n: os.environ.get(n) for n in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class _Judges(ProcessPoolExecutor):
    """Ctrl-C reaches every process of the terminal; the parent alone answers it. Processes start when work comes, and what signals are blocked
    then they block for ever: else one that is still importing would print where it was."""

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return super().submit(*args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def save_outputs(path: Path, out: Array, lse: Array, rows: Array) -> None:
    """Keep what the judge needs of a kernel's outputs: the query rows it compares. 16-bit values as their bits."""
    np.savez(path, out=out[:, rows].view(np.dtype(f"u{out.dtype.itemsize}")), lse=lse[:, :, rows])


def judge_outputs(attention: Attention, schedule: Schedule, problem: CheckProblem, seed: int, path: Path) -> Verdict:
    """Judge outputs that `save_outputs` kept; makes the inputs again from the seed, and removes the file."""
    rows = sample_rows(problem.sq, seed=seed)
    with np.load(path) as saved:
        out, lse = saved["out"].view(DTYPES[attention.output_dtype]), saved["lse"]
    path.unlink()
    c = make_case(attention, schedule, problem, seed=seed)
    want = yardstick(attention, c.q, c.k, c.v, rows, schedule, **c.row_descales)
    return compare(out, lse, **want._asdict(), dtype=attention.output_dtype)


def judge_simulated(
    attention: Attention, schedule: Schedule, problem: CheckProblem, seed: int, runs: int, ctas: int | None
) -> Verdict:
    """Simulate a problem `runs` times, each in another interleaving, and judge it. `ctas`: how many CTAs are run, None: all."""
    c = make_case(attention, schedule, problem, seed=seed)
    given = (attention, schedule, c.q, c.k, c.given_v)
    rows = None
    differs = ""
    try:
        if ctas is None:
            exact = problem.batch * problem.hq * problem.sq * problem.sk <= EXACT_SCORES
            out, lse = simulate(*given, seed=seed, exact_sums=exact, **c.descales)
            for n in range(1, runs):
                again = simulate(*given, seed=seed + n, exact_sums=exact, **c.descales)
                if not differs and not all(np.array_equal(_bits(a), _bits(b)) for a, b in zip((out, lse), again)):
                    differs = f"interleaving {n + 1} gives other bits than the first"
        else:
            part = simulate_sample(*given, seed=seed, ctas=ctas, **c.descales)
            out, lse, rows = part.out, part.lse, part.rows
    except LaunchError as e:  # deadlocks and faults of the simulated machine
        return Verdict(False, float("inf"), 0.0, float("inf"), f"{type(e).__name__}: {e}")
    found = check(attention, c.q, c.k, c.v, out, lse, schedule=schedule, rows=rows, seed=seed, **c.row_descales)
    return with_reason(found, differs)


def _bits(x: Array) -> Array:
    return np.ascontiguousarray(x).view(np.uint8)
