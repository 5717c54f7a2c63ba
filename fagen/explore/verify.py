"""Is an output on the GPU right? Judged on a sample, through torch, by the one policy of `fagen.oracle.compare`.

The reference is float64 and the baseline of the kernel's precision, as in `fagen.oracle`, but computed on the GPU, so that long
sequences cost little. `fagen check` is the thorough one; this keeps a wrong function from being timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..attention import Attention
from ..interop.arrays import FRAMEWORK_NAMES
from ..oracle.baseline import farthest, largest_weights, score_step_of, weight_step
from ..oracle.compare import Verdict, compare
from ..oracle.numeric import E4M3_DEPTH, E4M3_SUM_BITS
from ..oracle.yardstick import quantiser_of
from ..plan.kernel import Problem
from ..plan.precision import attended
from ..schedule import Schedule
from .verify_quantised import dequantised

HEADS, ROWS = 32, 64
"""Sampled: at most so many (batch, head) pairs, and query rows of each; the first and the last ones are always among them."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Expected:
    """Reference and baseline (out (pairs, rows, 1, head_dim_v), lse (pairs, 1, rows)) on the sampled places."""

    batches: Array
    heads: Array
    rows: Array
    reference: tuple[Array, Array]
    baseline: tuple[Array, Array]
    dtype: str
    weight_step: Array | float
    score_step: float


def expected(
    torch: Any, attention: Attention, problem: Problem, q: Any, k: Any, v: Any, seed: int, schedule: Schedule | None = None
) -> Expected:
    """q, k, v: torch tensors (batch, seq, heads, dim) on the GPU, of the attention's dtype, or what they stand for; mask full or
    causal. `schedule`: whose `precision` and `reference` the baseline shares; None: the attention's own precision, and a running
    maximum."""
    rng = np.random.default_rng(seed)
    pairs = _sample(rng, problem.batch * problem.hq, HEADS, edge=1)
    rows = _sample(rng, problem.sq, ROWS, edge=4)
    batches, heads = np.divmod(pairs, problem.hq)
    group = problem.hq // problem.hkv
    index = torch.as_tensor(rows, device=q.device)
    hidden = None
    if attention.causal:
        keys = torch.arange(problem.sk, device=q.device)
        hidden = keys[None, :] > index[:, None] + (problem.sk - problem.sq)
    quantiser = None if schedule is None else quantiser_of(schedule)
    inner, of_q, of_k, of_v, shift = attention, q, k, v, None
    if schedule is not None and quantiser is not None:
        inner, _ = attended(attention, schedule)
        of_q, of_k, of_v, shift = dequantised(torch, attention, quantiser, q, k, v)
    reference, baseline, largest = [], [], []
    for b, h in zip(batches.tolist(), heads.tolist()):
        rows_q, keys_k, keys_v = (t.double() for t in (q[b, index, h], k[b, :, h // group], v[b, :, h // group]))
        reference.append(_exact(torch, attention, rows_q, keys_k, keys_v, hidden))
        rows_q, keys_k, keys_v = (t.float() for t in (of_q[b, index, h], of_k[b, :, h // group], of_v[b, :, h // group]))
        outs, lse, most = _rounded(torch, inner, rows_q, keys_k, keys_v, hidden, largest_weights(inner, schedule))
        baseline.append((outs, lse if shift is None else lse + shift[b, h, index]))
        largest.append(_numpy(most)[:, None])
    q_top, k_top = (t.float().abs().amax(dim=(0, 1, 2)) for t in (of_q, of_k))
    step = score_step_of(inner, float((q_top * k_top).max()))
    exact, (outs, lse) = _stack(torch, reference), _stack(torch, baseline)
    nearly = farthest(outs.transpose(1, 0, *range(2, outs.ndim)), exact[0]), lse
    steps = weight_step(inner, schedule, np.stack(largest)), step
    return Expected(batches, heads, rows, exact, nearly, attention.output_dtype, *steps)


def judge(torch: Any, want: Expected, out: Any, lse: Any | None) -> Verdict:
    """Judge out (batch, seqlen_q, heads, head_dim_v) and lse (batch, heads, seqlen_q), or out alone where a function returns no lse.
    A NaN anywhere in either is wrong, sampled or not: inputs are finite, and outputs are filled with NaN before a first call."""
    for name, x in (("out", out), ("lse", lse)):
        if x is not None and bool(torch.isnan(x).any()):
            return Verdict(False, np.inf, 0.0, np.inf, f"{name} has {int(torch.isnan(x).sum())} NaN")
    b, h, r = (torch.as_tensor(i, device=out.device) for i in (want.batches, want.heads, want.rows))
    got = _numpy(out[b[:, None], r[None, :], h[:, None]])[:, :, None]
    got_lse = want.reference[1] if lse is None else _numpy(lse[b[:, None], h[:, None], r[None, :]])[:, None]
    return compare(
        got,
        got_lse,
        reference=want.reference,
        baseline=want.baseline,
        dtype=want.dtype,
        weight_step=want.weight_step,
        score_step=want.score_step,
        whole=None,
    )


def _sample(rng: np.random.Generator, n: int, count: int, edge: int) -> Array:
    if n <= count:
        return np.arange(n)
    inner = rng.choice(np.arange(edge, n - edge), size=count - 2 * edge, replace=False)
    return np.sort(np.r_[np.arange(edge), inner, np.arange(n - edge, n)])


def _scores(attention: Attention, q: Any, k: Any, hidden: Any | None) -> Any:
    s = (q @ k.T) * attention.softmax_scale
    return s if hidden is None else s.masked_fill(hidden, float("-inf"))


def _exact(torch: Any, attention: Attention, q: Any, k: Any, v: Any, hidden: Any | None) -> tuple[Any, Any]:
    s = _scores(attention, q, k, hidden)
    lse = torch.logsumexp(s, dim=1)
    blind = torch.isneginf(lse)
    p = torch.exp(s - lse.masked_fill(blind, 0.0)[:, None])
    return p @ v, lse


def _rounded(
    torch: Any, attention: Attention, q: Any, k: Any, v: Any, hidden: Any | None, weights: Sequence[float]
) -> tuple[Any, Any, Any]:
    """The baselines: float32 scores and sums, P (times each of `weights`) and the outputs (len(weights), …) rounded to their types; their lse; how
    much of out a row's largest weight makes (rows, head_dim_v)."""
    p_type, out_type = (getattr(torch, FRAMEWORK_NAMES[t]) for t in (attention.value_dtype, attention.output_dtype))
    s = _tensor_core(torch, attention.dtype, q, k.T) * attention.softmax_scale
    s = s if hidden is None else s.masked_fill(hidden, float("-inf"))
    top = s.amax(dim=1, keepdim=True)
    blind = torch.isneginf(top)
    p = torch.exp(s - top.masked_fill(blind, 0.0))
    total = p.sum(dim=1, keepdim=True)
    outs = [
        _tensor_core(torch, attention.value_dtype, (p * w).to(p_type).float(), v) / (total * w).masked_fill(blind, 1.0)
        for w in weights
    ]
    largest = (v[s.argmax(dim=1)].abs() / total).masked_fill(blind, 0.0)
    return torch.stack(outs).to(out_type), (top + torch.log(total)).squeeze(1), largest


def _tensor_core(torch: Any, dtype: str, a: Any, b: Any) -> Any:
    """`oracle.numeric.tensor_core` on the GPU."""
    if dtype != "e4m3":
        return a @ b
    total = torch.zeros(a.shape[0], b.shape[1], device=a.device)
    for k in range(0, a.shape[1], E4M3_DEPTH):
        total += a[:, k : k + E4M3_DEPTH] @ b[k : k + E4M3_DEPTH]
        total.view(torch.int32).bitwise_and_(-1 << (23 - E4M3_SUM_BITS))
    return total


def _stack(torch: Any, parts: list[tuple[Any, Any]]) -> tuple[Array, Array]:
    """Of all pairs: out (pairs, …, rows, 1, head_dim_v) and lse (pairs, 1, rows)."""
    out, lse = (_numpy(torch.stack(x)) for x in zip(*parts))
    return out[..., None, :], lse[:, None]


def _numpy(x: Any) -> Array:
    array: Array = (x if x.dtype.itemsize >= 4 else x.float()).cpu().numpy()
    return array
