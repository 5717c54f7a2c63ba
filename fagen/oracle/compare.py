"""When is an output right? One policy for every check: CPU and GPU, tests and command line.

1. NaN stands exactly where the reference has NaN, and each infinity exactly where the reference has it, with its sign.
2. out, where finite: |out − reference| ≤ 2 · (largest error of the baseline) + 1 ulp of the output's type at the reference
   + against a stale reference, what rounding the row's largest weight may change of the element (`baseline.weight_step`).
3. Where P has 16 bits: the root mean square of out's errors in each (batch, head) ≤ 1.5 · that of the baseline's + what one element may differ
   by, 1 ulp. It shows what is a little wrong everywhere, as a scale that is half a percent off, which no single element tells.
   Where P is e4m3: by what part of itself each (batch, head) of out is too large, Σ error · reference / Σ reference², is at most twice that of
   the baseline + 0.01 + 0.03 / √(rows that count). Roundings to 3 bits go either way, a wrong scale does not: 2 % of it show in 100 rows.
4. lse, where finite: |lse − reference| ≤ 2 · (largest error of the baseline's lse) + 16 ulp of float32 at the largest |lse|
   + for e4m3, what the tensor core may cut off one score (`score_step`).

The baseline (`baseline.py`) has the kernel's precision but neither its order of summation nor its approximate ex2 and lg2
instructions: hence the factor 2, and the ulps for a baseline that happens to be exact. A kernel with a stale reference has two baselines, of
which the one counts that is farther off in an element (`baseline.largest_weights`). The tensor cores truncate where they
add, with an error that goes with the largest scores: hence lse's bound at the largest |lse|. Of e4m3 they keep few bits, and how they
cut is known only nearly: with a few scores the baseline may happen to cut off less, hence the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..attention import Attention
from ..descales import Descales
from ..schedule import Schedule
from .numeric import F32, F64, Array, ulp
from .yardstick import Whole, yardstick

if TYPE_CHECKING:
    from typing_extensions import Unpack

ERROR_FACTOR = 2.0
RMS_FACTOR = 1.5
"""Of 4900 simulated cases of all built-in schedules and types the largest was 1.09."""
SCALE_OFF, SCALE_OFF_ONE_ROW = 0.01, 0.03
"""Of 17000 simulated heads, beyond twice the baseline's: 0.004 at most with more than four rows that count, 0.014 with fewer."""
LSE_ULPS = 16
SAMPLE_ABOVE = 2048
"""Query rows above which `check` compares a sample of them."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Verdict:
    """`error` and `bound` are those of the element of `out` that comes closest to (or is furthest past) its bound;
    `error_ratio` = error / bound. inf where positions of NaN or inf differ. `reason`: why it failed, "" if it passed."""

    passed: bool
    error: float
    bound: float
    error_ratio: float
    reason: str = ""


def compare(
    out: Array,
    lse: Array,
    *,
    reference: tuple[Array, Array],
    baseline: tuple[Array, Array],
    dtype: str,
    weight_step: F32 | float = 0.0,
    score_step: float = 0.0,
    mask: Mask | None = None,
    whole: Whole | None = "spread",
) -> Verdict:
    """Judge out (batch, rows, heads, head_dim_v) of type `dtype` and lse (batch, heads, rows) against (out, lse) of the float64
    `reference` and of the `baseline`. `weight_step` (of out's shape) and `score_step`: as in `baseline`. `mask` (batch, heads, rows): rows to judge, None: all.
    `whole`: as `Yardstick.whole` has it; None: rule 3 does not hold, as of others' functions, which need not round where ours do."""
    for name, got, want in (("out", out, reference[0]), ("lse", lse, reference[1])):
        if got.shape != want.shape:
            return _failed(f"{name} has shape {got.shape} instead of {want.shape}")
    live = np.ones(lse.shape, bool) if mask is None else mask
    wide = np.broadcast_to(live.transpose(0, 2, 1)[..., None], out.shape)
    judged, (base_out, base_lse) = [], baseline
    of_head = ""
    for name, got, want, base, where in (("out", out, reference[0], base_out, wide), ("lse", lse, reference[1], base_lse, live)):
        g, w, b = np.asarray(got, np.float64), np.asarray(want, np.float64), np.asarray(base, np.float64)
        reason = _positions(name, g, w, where)
        if reason:
            return _failed(reason)
        finite = where & np.isfinite(w)
        known = finite & np.isfinite(b)
        yardstick = np.abs(b[known] - w[known]).max(initial=0.0)
        if name == "out":
            one = ulp(w, dtype)
            of_head = _spread(g, w, b, one, known) if whole == "spread" else _scale(g, w, b, known) if whole == "scale" else ""
            slack = one + weight_step
        else:
            slack = np.full(w.shape, score_step + LSE_ULPS * float(ulp(np.abs(w[finite]).max(initial=1.0), "fp32")))
        judged.append(_worst(name, g, w, finite, ERROR_FACTOR * yardstick + slack))
    (error, bound, reason), (_, _, lse_reason) = judged
    reason = "; ".join(r for r in (reason, of_head, lse_reason) if r)
    return Verdict(not reason, error, bound, error / bound, reason)


def check(
    attention: Attention,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    schedule: Schedule | None = None,
    rows: npt.ArrayLike | None = None,
    seed: int = 0,
    **descales: Unpack[Descales],
) -> Verdict:
    """Compute reference and baseline (of q, k, v and descales as `reference` takes them; the baseline in the `precision` of the schedule)
    and judge `out` and `lse` (whole, as a kernel
    returns them).

    `rows`: a mask (batch, heads, seqlen_q) of the rows to judge (as `Simulation.rows`), or indices of query rows, judged in all
    heads. None: all rows up to 2048, above that a sample of 256 with the first and the last ones, chosen by `seed`.
    """
    sq, mask = q.shape[1], None
    if rows is None:
        index = sample_rows(sq, seed=seed)
    elif np.asarray(rows).dtype == np.bool_:
        mask = np.asarray(rows, np.bool_)
        index = np.flatnonzero(mask.any(axis=(0, 1)))
        mask = mask[:, :, index]
    else:
        index = np.asarray(rows, np.int64)
    want = yardstick(attention, q, k, v, index, schedule, **descales)
    return compare(out[:, index], lse[:, :, index], **want._asdict(), dtype=attention.output_dtype, mask=mask)


def sample_rows(sq: int, *, count: int = 256, seed: int = 0) -> npt.NDArray[np.int64]:
    """Rising indices of query rows to compare: all up to 2048 rows, above that `count` of them: the first and last eight, the rest
    random."""
    if sq <= SAMPLE_ABOVE:
        return np.arange(sq)
    edges = np.r_[np.arange(8), np.arange(sq - 8, sq)]
    inner = np.random.default_rng(seed).choice(np.arange(8, sq - 8), size=count - len(edges), replace=False)
    return np.sort(np.r_[edges, inner]).astype(np.int64)


def _positions(name: str, got: F64, want: F64, where: Mask) -> str:
    """Why the NaN and infinities of the two do not coincide, or ""."""
    wrong = where & (np.isnan(got) != np.isnan(want))
    inf = (np.isinf(got) | np.isinf(want)) & ~np.isnan(got) & ~np.isnan(want)
    wrong |= where & inf & (got != want)
    if not wrong.any():
        return ""
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"{name}{list(at)} is {got[at]:.6g} where the reference has {want[at]:.6g} ({int(wrong.sum())} such places)"


def _worst(name: str, got: F64, want: F64, finite: Mask, bound: F64) -> tuple[float, float, str]:
    """Error and bound where their ratio is largest, and why that fails, or ""."""
    if not finite.any():
        return 0.0, float(bound.max(initial=1.0)), ""
    with np.errstate(invalid="ignore"):
        error = np.abs(got - want)
        at = np.unravel_index(int(np.argmax(np.where(finite, error / bound, -1.0))), error.shape)
    e, b = float(error[at]), float(bound[at])
    if e <= b:
        return e, b, ""
    place = [int(i) for i in at]
    text = f"{name}{place} is {got[at]:.6g} where the reference has {want[at]:.6g}: error {e:.3g} is above the bound {b:.3g}"
    return e, b, text


def _spread(got: F64, want: F64, base: F64, ulps: F64, known: Mask) -> str:
    """In which (batch, head) the root mean square of the errors is furthest above its bound, or ""."""
    count = np.maximum(known.sum(axis=(1, 3)), 1)

    def rms(x: F64) -> F64:
        found: F64 = np.sqrt((np.where(known, x, 0.0) ** 2).sum(axis=(1, 3)) / count)
        return found

    with np.errstate(invalid="ignore"):
        mine, bound = rms(got - want), RMS_FACTOR * rms(base - want) + rms(ulps) / np.sqrt(count)
    if (mine <= bound).all():
        return ""
    b, h = np.unravel_index(int(np.argmax(mine - bound)), mine.shape)
    return f"out[{b}, :, {h}]: the root mean square of its errors, {mine[b, h]:.3g}, is above the bound {bound[b, h]:.3g}"


def _scale(got: F64, want: F64, base: F64, known: Mask) -> str:
    """Which (batch, head) is furthest beyond what its scale may be off, or ""."""
    g, w, b = (np.where(known, x, 0.0) for x in (got, want, base))
    tiny = np.finfo(np.float64).tiny  # a head of zeros has no scale
    energy = (w * w).sum(axis=3)  # of each row
    total = np.maximum(energy.sum(axis=1), tiny)
    rows = np.maximum(total**2 / np.maximum((energy**2).sum(axis=1), tiny), 1.0)
    mine, its = (((x - w) * w).sum(axis=(1, 3)) / total for x in (g, b))
    bound = ERROR_FACTOR * np.abs(its) + SCALE_OFF + SCALE_OFF_ONE_ROW / np.sqrt(rows)
    if (np.abs(mine) <= bound).all():
        return ""
    i, h = np.unravel_index(int(np.argmax(np.abs(mine) - bound)), mine.shape)
    return f"out[{i}, :, {h}] is {100 * mine[i, h]:+.2g} % off as a whole, beyond the bound of {100 * bound[i, h]:.2g} %"


def _failed(reason: str) -> Verdict:
    return Verdict(False, np.inf, 0.0, np.inf, reason)
