"""`fagen check --accuracy` on a device: what comes out is what the simulator predicts, in every way of quantising.

Kernels come from FAGEN_TEST_KERNELS (`fagen build fa3 fa3_fp8 --accuracy --set head_dim=64 --shape 2,8,4,700,1300 -o DIR`) where this
machine should not compile.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from fagen.accuracy import AccuracyResult
from fagen.accuracy.result import WITHIN
from fagen.accuracy.table import agreement
from fagen.cli import run

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("device")]
FOLDER = os.environ.get("FAGEN_TEST_KERNELS")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> AccuracyResult:
    target = tmp_path_factory.mktemp("accuracy") / "a.json"
    options = [
        "--set",
        "head_dim=64",
        "--shape",
        "2,8,4,700,1300",
        "--output",
        str(target),
        *(["--from", FOLDER] if FOLDER else []),
    ]
    assert run(["check", "fa3", "fa3_fp8", "--accuracy", "--device", "gpu", *options]) == 0
    return AccuracyResult.from_dict(json.loads(Path(target).read_text()))


def test_every_row_is_measured_as_predicted(result: AccuracyResult) -> None:
    (e,) = result.experiments
    ours = [r for r in e.rows if r.kind == "schedule"]
    assert [sum(name in r.recipe for r in ours) for name in ("fp16", "int8 ", "int8_qk ", "per ")] == [1, 4, 4, 15]
    assert len(ours) == 16 and result.gpu and result.ok
    for r in ours:
        assert r.outcome == "right" and r.measured is not None and r.measured.rows == 2 * 8 * 700
        ratio = agreement(r)
        assert ratio is not None and abs(ratio - 1) <= WITHIN
        assert r.measured.rmse_lse is not None and np.isfinite(r.measured.rmse_lse)


def test_the_order_of_the_ways(result: AccuracyResult) -> None:
    (e,) = result.experiments
    rmse = {r.recipe: r.measured.rmse for r in e.rows if r.kind == "schedule" and r.measured}
    assert rmse["fp16"] < rmse["int8 per block, Hadamard"] < rmse["per block, Hadamard"] < rmse["per tensor"]


def test_the_peer_is_measured_or_says_why_not(result: AccuracyResult) -> None:
    (e,) = result.experiments
    theirs = [r for r in e.rows if r.kind == "peer"]
    assert [r.recipe for r in theirs] == ["fp16", "per tensor", "per head, Hadamard"]
    for r in theirs:
        assert (r.outcome, bool(r.reason)) in (("right", False), ("absent", True))
