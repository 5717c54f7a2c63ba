"""What `explain --json` says of each schedule on its sizes: what binds it, and the predicted time."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from fagen import cli

LONG = "1,16,16,16384,16384"


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.run(["explain", *arguments, "--no-compile", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_fa1_on_one_long_sequence_is_bound_by_parallelism(capsys: pytest.CaptureFixture[str]) -> None:
    found = explained(capsys, "fa1", "--shape", LONG)
    assert found["binds"] == "parallelism" and found["counts"]["attention"]["busiest_sm"] > 5
    assert found["predicted_us"] > found["bound_us"]


@pytest.mark.parametrize("shape", [LONG, "4,16,16,4096,4096", "16,16,16,4096,4096"])
def test_standard_is_bound_by_memory(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = explained(capsys, "standard", "--shape", shape)
    assert found["binds"] == "hbm"
    assert set(found["predicted_kernels_us"]) == {"qk", "softmax", "pv"}
    assert sum(found["predicted_kernels_us"].values()) == pytest.approx(found["predicted_us"])


@pytest.mark.parametrize("shape", ["1,32,32,16384,16384", "4,32,32,4096,4096"])
def test_fa3_at_head_dim_64_needs_both_units_alike(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = explained(capsys, "fa3", "--set", "head_dim=64", "--shape", shape)
    times = found["times_us"]
    assert found["binds"] in ("exp", "tensor") and times["exp"] == pytest.approx(times["tensor"], rel=0.05)


def test_fa3_at_head_dim_128_is_bound_by_the_tensor_cores(capsys: pytest.CaptureFixture[str]) -> None:
    found = explained(capsys, "fa3", "--shape", LONG)
    assert found["binds"] == "tensor" and found["times_us"]["exp"] < 0.6 * found["times_us"]["tensor"]
    assert found["predicted_us"] == pytest.approx(3002, rel=0.1), "benchmarks/results/ladder.json"


def test_the_text_tells_the_predicted_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["explain", "fa3", "--no-compile", "--shape", LONG]) == 0
    assert re.search(r"Predicted: [23],\d{3}\.\d µs a launch\.", capsys.readouterr().out)
