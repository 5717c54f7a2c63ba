"""Tuning on a real GPU: injected kernels that are wrong, trap or hang never win and are told (case T01); records are reused.

Kernels are compiled here, with whatever NVRTC there is, and from sources that are then damaged."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from fagen import cli, load
from fagen.compile import build, write_built
from fagen.emit import emit
from fagen.explore.tune_result import SCHEMA, Candidate, Prepared, TuneResult
from fagen.explore.tune_run import manifest
from fagen.explore.tune_store import Store
from fagen.plan import plan

pytestmark = pytest.mark.gpu

ATTENTION, FA3 = load("fa3", head_dim=64)
START = FA3.replace(tile_q=128, consumers=2, parallelism="query_tiles", overlap="within")
BEFORE = re.compile(r"const int cta = blockIdx\.x.*\n")
HALF = "if (blockIdx.x % 2) return;"
NOTHING = "if (gridDim.x) return;"
TRAP = 'asm volatile("trap;");'
HANG = "while (clock64() > 0) __nanosleep(1000);"


def candidates(folder, damages):
    """Candidates of tile_kv 32, 48, …, each with the damage done to its kernel ("" for none), as `fagen tune --build-only` leaves them."""
    made = []
    for i, damage in enumerate(damages):
        schedule = START.replace(tile_kv=32 + 16 * i)
        planned = plan(ATTENTION, schedule)
        source = emit(planned, f"c{i}")
        text, places = BEFORE.subn(lambda m, damage=damage: f"{m[0]}  {damage}\n", source.text)
        assert places == 1
        write_built(build(planned, replace(source, text=text if damage else source.text), enforce=not damage), folder, f"c{i}")
        made.append(Candidate(f"c{i}", schedule))
    prepared = Prepared(SCHEMA, ATTENTION, "fa3", START, len(made), len(made), {}, 0, len(made), 0, tuple(made), ())
    manifest(folder, "fa3.hd64-bf16-full").write_text(prepared.to_json())
    return made


def tune(capsys, folder, *arguments):
    code = cli.run(["tune", "fa3", "--set", "head_dim=64", "--from", str(folder), "--vs", "none", "--json", *arguments])
    out, err = capsys.readouterr()
    assert code in (0, 1), err
    return code, TuneResult.from_dict(json.loads(out))


def test_injected_kernels_never_win_and_are_told(torch, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    candidates(tmp_path / "k", ["", HALF, NOTHING, TRAP, ""])
    store = str(tmp_path / "store")
    arguments = ("--shape", "2,8,8,1024,1024", "--rounds", "6", "--store", store)
    code, result = tune(capsys, tmp_path / "k", *arguments)
    assert code == 0 and result.shapes[0].winner in ("c0", "c4")
    failed = {f.name: f for f in result.failures}
    assert set(failed) == {"c1", "c2", "c3"} and {f.stage for f in failed.values()} == {"verify"}
    assert "NaN" in failed["c1"].reason and "NaN" in failed["c2"].reason
    assert failed["c3"].bundle is not None, failed["c3"].reason
    assert cli.run(["repro", failed["c3"].bundle]) == 1, "the bundle fails again"
    capsys.readouterr()
    records = {r.schedule.tile_kv: r for r in Store(store)}
    assert records[32].stage == records[96].stage == "timed" and records[80].stage == "verify"
    code, again = tune(capsys, tmp_path / "k", *arguments, "--resume")
    assert code == 0 and again.shapes[0].reused == 5 and again.seconds["verify"] < 1
    assert {f.name for f in again.failures} == {"c1", "c2", "c3"} and all("stored" in f.reason for f in again.failures)


def test_a_hang_costs_one_process(torch, tmp_path, capsys, monkeypatch):
    """Takes the 20 seconds after which a launch counts as hanging."""
    monkeypatch.chdir(tmp_path)
    candidates(tmp_path / "k", ["", HANG, ""])
    code, result = tune(capsys, tmp_path / "k", "--shape", "2,8,8,1024,1024", "--rounds", "6")
    assert code == 0 and result.shapes[0].winner in ("c0", "c2")
    (failure,) = result.failures
    assert failure.name == "c1" and failure.bundle is not None and "no sign of life" in failure.reason


def test_a_tune_from_a_bad_start_within_its_budget(torch, tmp_path, capsys, monkeypatch):
    """The whole way, on a small space: compiled here, pruned, verified, raced, with the tuned entry beside."""
    monkeypatch.chdir(tmp_path)
    arguments = ["tune", "fa3", "--set", "tile_kv=64", "--set", "stages=1", "--set", "overlap=none", "--exclude-known", "--shape"]
    over = [
        "--over",
        "tile_kv=64:96:128",
        "--over",
        "overlap=none:both",
        "--over",
        "reference=running:stale",
        "--over",
        "stages=1:2",
    ]
    options = ["--vs", "none", "--keep", "6", "--budget", "120s", "--rounds", "6", "--json"]
    assert cli.run([*arguments, "4,16,16,4096,4096", *over, *options]) == 0
    result = TuneResult.from_dict(json.loads(capsys.readouterr().out))
    shape = result.shapes[0]
    start = next(r for r in (*shape.final, *shape.screened) if r.name.endswith(result.prepared.start.id))
    assert shape.final[0].tflops.median > 1.3 * start.tflops.median
    (beside,) = shape.beside
    assert beside.vs_winner is not None and sum(result.seconds.values()) < 120
