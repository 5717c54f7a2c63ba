"""What an output is measured against: float64 of the tensors as given, and how far a careful computation of the kernel's precision is
from it; where the plan quantises, its baseline quantises too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ..attention import Attention
from ..descales import Descales
from ..plan.precision import attended, granularity
from ..schedule import Schedule
from .baseline import baselines_of, farthest, largest_weights, score_step, weight_step
from .numeric import F32, Array
from .quantise import Quantiser, lse_shift, quantise
from .reference import reference_rows

if TYPE_CHECKING:
    from typing_extensions import Unpack


Whole = Literal["spread", "scale"]
"""What `compare` judges of a head as a whole: its errors' root mean square, or whether it is too large or small by a factor."""


class Yardstick(NamedTuple):
    """(out, lse) of reference and baseline, and what `compare` takes as weight_step, score_step and whole."""

    reference: tuple[Array, Array]
    baseline: tuple[Array, Array]
    weight_step: F32 | float
    score_step: float
    whole: Whole


def quantiser_of(schedule: Schedule) -> Quantiser | None:
    """How the plan of a schedule quantises; None without `precision`."""
    if schedule.precision is None:
        return None
    by = granularity(schedule)
    more: dict[str, Any] = {"dtype": "int8", "v_dtype": None} if schedule.precision == "int8_qk" else {"dtype": schedule.precision}
    if by == "block":
        more |= {"tile_q": schedule.tile_q, "tile_kv": schedule.tile_kv}
    return Quantiser(granularity=by, hadamard=schedule.hadamard, smooth_k=schedule.smooth_k, **more)


def yardstick(
    attention: Attention,
    q: Array,
    k: Array,
    v: Array,
    rows: npt.ArrayLike,
    schedule: Schedule | None = None,
    **descales: Unpack[Descales],
) -> Yardstick:
    """Of some query rows, as `reference_rows` has them. `schedule`: whose `precision` and `reference` the baseline shares; None: no precision but
    the attention's own, and a running maximum."""
    reference = reference_rows(attention, q, k, v, rows, **descales)
    quantiser = None if schedule is None else quantiser_of(schedule)
    if schedule is None or quantiser is None:
        outs, lse, largest = baselines_of(attention, q, k, v, rows, largest_weights(attention, schedule), **descales)
        steps = weight_step(attention, schedule, largest), score_step(attention, q, k, **descales)
        return Yardstick(reference, (farthest(outs, reference[0]), lse), *steps, _whole(attention))
    inner, _ = attended(attention, schedule)
    quantised = quantise(q, k, v, quantiser)
    of_q, of_k, of_v = quantised.dequantised()
    outs, lse, largest = baselines_of(inner, of_q, of_k, of_v, rows, largest_weights(inner, schedule))
    if quantised.k_mean is not None:
        lse += lse_shift(q[:, np.asarray(rows, np.int64)], quantised.k_mean, attention.softmax_scale)
    steps = weight_step(inner, schedule, largest), score_step(inner, of_q, of_k)
    return Yardstick(reference, (farthest(outs, reference[0]), lse), *steps, _whole(inner))


def _whole(attention: Attention) -> Whole:
    """P of 16 bits loses as little whatever part of its type's range a row uses: then a kernel's errors are the baseline's on average, too. e4m3
    has so few small numbers that they need not be (docs/schedule.md, `reference`); only that they go either way can be asked of it."""
    return "scale" if attention.value_dtype == "e4m3" else "spread"
