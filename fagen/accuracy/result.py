"""What an accuracy table holds, as values with an exact JSON round trip."""

from __future__ import annotations

from dataclasses import dataclass

from ..attention import Attention
from ..explore.bench_result import Record
from ..oracle.quantise import Quantiser
from ..plan.kernel import Problem
from ..schedule import Schedule

SCHEMA = 1
WITHIN = 0.10
"""How far a measured RMSE may be from the predicted one, of the same query rows."""


@dataclass(frozen=True)
class Errors(Record):
    """Of some query rows, against float64."""

    rows: int
    """How many, over all heads."""
    rmse: float
    """Root of the mean squared error of the elements of out."""
    largest: float
    """Largest absolute error of an element of out."""
    rmse_lse: float | None
    """Of lse, where it is finite; None where the function returns no lse."""


@dataclass(frozen=True)
class AccuracyRow(Record):
    """One row. `kind`: "schedule" (a kernel of ours), "peer" (another's), "standard" (in NumPy: scores and P rounded to the 16-bit type).

    `outcome`: "right"; "wrong": something not finite came out; "off": measured and predicted differ by more than `WITHIN`; "refused":
    `plan()` refuses the schedule; "absent": the peer is not here, or does not take this. `reason` tells more of the last four.
    """

    kernel: str
    """The schedule's or the peer's name."""
    kind: str
    recipe: str
    """How the inputs were made and what of the schedule was changed, in words."""
    attention: Attention
    schedule: Schedule | None
    quantiser: Quantiser | None
    outcome: str
    reason: str
    measured: Errors | None
    """On the GPU, of all rows that have a reference. Of "standard": the same rows, in NumPy."""
    sampled: Errors | None
    """On the GPU, of the rows that were simulated."""
    predicted: Errors | None
    """By the simulator, of those rows."""

    @property
    def errors(self) -> Errors | None:
        """What the row says: measured, or else predicted."""
        return self.measured or self.predicted

    @property
    def bad(self) -> bool:
        return self.outcome in ("wrong", "off")


@dataclass(frozen=True)
class Experiment(Record):
    title: str
    inputs: str
    """Where the tensors are from."""
    dtype: str
    """Of the tensors: "fp16" or "bf16"."""
    problem: Problem
    mask: str
    scale: float
    """Of the softmax."""
    rms_out: float
    """Root mean square of the reference's out over the rows that the first column of errors speaks of."""
    rows: tuple[AccuracyRow, ...]


@dataclass(frozen=True)
class AccuracyResult(Record):
    schema: int
    started: str
    """UTC, ISO 8601."""
    seconds: float
    gpu: str
    """"" : the simulator alone."""
    driver: str
    versions: dict[str, str]
    seed: int
    experiments: tuple[Experiment, ...]

    @property
    def ok(self) -> bool:
        return not any(row.bad for e in self.experiments for row in e.rows)


def agreement(row: AccuracyRow) -> float | None:
    """Measured RMSE / predicted RMSE of the same rows."""
    if row.sampled is None or row.predicted is None or row.predicted.rmse == 0:
        return None
    return row.sampled.rmse / row.predicted.rmse
