"""Measured shares on a real GPU: kernels without something run, and the one that saves most lacks what binds.

Kernels are compiled here, or taken from FAGEN_TEST_BINDS, a folder that `python benchmarks/what_binds.py --build DIR` wrote, where this
machine should not compile.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fagen.cli import run
from fagen.explore.bench_result import BenchResult

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
BUILT = ["--from", os.environ["FAGEN_TEST_BINDS"]] if "FAGEN_TEST_BINDS" in os.environ else []


def test_explain_measures_the_kernel_and_what_is_left_of_it(torch, tmp_path, capsys):
    output = tmp_path / "times.json"
    command = ["explain", "fa3", "--no-compile", "--measure", "--rounds", "6", "--output", str(output), "--json", *BUILT]
    assert run(command) == 0
    answer = json.loads(capsys.readouterr().out)
    found = answer["measured"]
    assert [s["removed"] for s in found["shares"]] == ["softmax", "loads", "pv"]
    assert 0.3 < found["bound_share"] < 1.05, "no launch beats the bound"
    for s in found["shares"]:
        assert -0.05 < s["saved"]["low"] <= s["saved"]["median"] <= s["saved"]["high"] < 1
        assert 1e3 * s["ms"]["median"] > 0.9 * s["bound_us"]
    rows = {row.function: row for case in BenchResult.from_json(output.read_text()).cases for row in case.rows}
    assert rows["fa3"].kind == "schedule" and rows["fa3"].error_ratio <= 1
    for name in ("softmax", "loads", "pv"):
        row = rows[f"fa3 without {name}"]
        assert (row.kind, row.outcome, row.error_ratio) == ("removal", "timed", None)
    assert run(["explain", "fa3", "--no-compile", "--shape", "1,16,16,16384,16384", "--from-results", str(output)]) == 0
    assert "Measured on" in capsys.readouterr().out


def test_the_removal_that_saves_most_removes_what_binds(torch, tmp_path):
    output = tmp_path / "what_binds.json"
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "what_binds.py", *BUILT, "--output", output],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(case["right"] for case in json.loads(output.read_text())["cases"])
