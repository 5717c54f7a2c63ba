"""Bytes between DRAM, L2 and the SMs: what `fagen explain` predicts beside what ncu counts, a row per kernel.

    python benchmarks/memory_traffic.py standard fa1 fa2 fa3 --shape 4,16,16,2048,2048 [--from DIR] [--output FILE]

Needs a GPU, and ncu (Nsight Compute) with access to the counters. ncu runs each kernel a few times, caches flushed before each, at
unlocked clocks. Its counters: dram__bytes_read.sum and dram__bytes_write.sum; l1tex__m_xbar2l1tex_read_bytes.sum, everything that comes
from L2 into the SMs, ordinary loads, cp.async and TMA alike; l1tex__m_l1tex2xbar_write_bytes.sum, everything that leaves them.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shutil
import subprocess
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

import fagen
from fagen.cli.bench import check_output
from fagen.cli.common import built, planned, select
from fagen.cli.explain import parse_problem
from fagen.errors import FagenError, InputError, LaunchError
from fagen.explore.explain import explain
from fagen.launch import Kernel
from fagen.oracle import make_inputs
from fagen.plan import Problem, assemble

METRICS = {
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_written_bytes": "dram__bytes_write.sum",
    "sm_read_bytes": "l1tex__m_xbar2l1tex_read_bytes.sum",
    "sm_written_bytes": "l1tex__m_l1tex2xbar_write_bytes.sum",
}
UNITS = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "": 1.0}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("schedules", nargs="+")
    options.add_argument("--shape", required=True, help="B,HQ,HKV,SQ,SK")
    options.add_argument("--from", dest="built", help="where `fagen build` wrote the kernels")
    options.add_argument("--output")
    options.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    o = options.parse_args()
    try:
        if o.launch:
            launch(o.schedules, parse_problem(o.shape), o.built)
        else:
            compare(o)
    except FagenError as e:
        print(f"memory_traffic.py: {e}", file=sys.stderr)
        sys.exit(e.exit_code)


def compare(o: argparse.Namespace) -> None:
    """Predict and measure; what is wrong with the arguments is said before anything runs."""
    problem = parse_problem(o.shape)
    if not problem.sk:
        raise InputError("--shape", f"{o.shape!r} has no keys; what does nothing is not measured")
    target = check_output("--output", o.output)
    for item in select(o.schedules):
        planned(item)
        if o.built:
            built(item, folder=o.built)
    if shutil.which("ncu") is None:
        raise LaunchError("ncu is not on the PATH; it comes with NVIDIA Nsight Compute")
    rows = merge(o.schedules, problem, measure(sys.argv[1:]))
    show(rows, o.shape)
    if target:
        target.write_text(json.dumps({"shape": o.shape, "metrics": METRICS, "kernels": rows}, indent=1) + "\n")


def launch(names: list[str], problem: Problem, folder: str | None) -> None:
    """What runs under ncu: each schedule once, on random inputs."""
    for item in select(names):
        b = built(item, folder=folder)
        Kernel(b.plan, b.source.text, b.cubin, b.report)(*make_inputs(item.attention, problem, seed=0))


def measure(arguments: list[str]) -> list[dict[str, Any]]:
    """Run this script again under ncu: a dict of counters for each kernel, in the order of the launches."""
    command = ["ncu", "--csv", "--clock-control", "none", "--metrics", ",".join(METRICS.values())]
    run = subprocess.run([*command, sys.executable, __file__, *arguments, "--launch"], capture_output=True, text=True, check=False)
    lines = run.stdout.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if run.returncode or start is None:
        sys.exit(f"ncu failed ({run.returncode}):\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    kernels: dict[str, dict[str, Any]] = {}
    of_metric = {v: k for k, v in METRICS.items()}
    for row in csv.DictReader(lines[start:]):
        kernel = kernels.setdefault(row["ID"], {"kernel": re.split(r"[(<]", row["Kernel Name"])[0]})
        kernel[of_metric[row["Metric Name"]]] = float(row["Metric Value"].replace(",", "")) * UNITS[row["Metric Unit"]]
    return list(kernels.values())


def merge(names: list[str], problem: Problem, measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Beside each measured kernel what `explain` predicts for it."""
    rows = []
    for name in names:
        predicted = explain(assemble(*fagen.load(name)), problem=problem)["counts"]
        for kernel, counts in predicted.items():
            if not measured:
                sys.exit(f"ncu saw no launch of {name}: {kernel}")
            got = measured.pop(0)
            rows.append(
                {
                    "schedule": name,
                    "kernel": kernel,
                    "predicted": {m: counts[m]["all"] for m in METRICS},
                    "measured": {m: got[m] for m in METRICS},
                }
            )
    if measured:
        sys.exit(f"ncu saw {len(measured)} launches more than the schedules have")
    return rows


def show(rows: list[dict[str, Any]], shape: str) -> None:
    table = Table(title=f"{shape}: MB predicted / measured")
    for title in ("kernel", "DRAM read", "DRAM written", "into SMs", "out of SMs"):
        table.add_column(title, justify="left" if title == "kernel" else "right")
    for row in rows:
        cells = [f"{row['predicted'][m] / 1e6:,.0f} / {row['measured'][m] / 1e6:,.0f}" for m in METRICS]
        table.add_row(row["schedule"] if row["schedule"] == row["kernel"] else f"{row['schedule']}: {row['kernel']}", *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
