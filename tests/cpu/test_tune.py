"""What tuning tries, the workshop's processes, and the command, without a GPU."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fake_tuning import FA3, FULL, LONG, FakeRunner

import fagen
from fagen import Attention, InputError, LaunchError, Schedule, cli, load, tuned
from fagen.check import CaseResult as CheckResult
from fagen.check import GpuRun
from fagen.cli.bar import Bar
from fagen.explore import bench_lab, tune_cluster, tune_run
from fagen.explore.tune import silent
from fagen.explore.tune_result import Broken, Candidate, TuneResult
from fagen.explore.tune_run import Workshop, verify_problems
from fagen.explore.tune_space import Space, default_axes, enumerate_space
from fagen.guard import GuardError
from fagen.oracle import Verdict

HERE = Path(__file__).parent


# what is tried ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fa3", "fa3_fp8"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_built_in_schedules_blocks_are_among_what_is_tried(name: str, head_dim: int) -> None:
    attention, schedule = load(name, head_dim=head_dim)
    assert schedule.tile_kv in default_axes(attention, schedule)["tile_kv"]


@cache
def space_of(name: str, head_dim: int, mask: str = "full") -> tuple[Attention, Schedule, Space]:
    """The default space: some thousand schedules looked at."""
    attention, base = load(name, head_dim=head_dim, mask=mask)
    return attention, base, enumerate_space(attention, base, default_axes(attention, base))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_default_spaces_contain_the_winners_of_the_table(head_dim: int) -> None:
    for mask in ("full", "causal"):
        _, base, space = space_of("fa3", head_dim, mask)
        entries = [e for e in tuned.builtin_tables()[0].entries if (e.head_dim, e.mask, e.base) == (head_dim, mask, "fa3")]
        assert entries and {e.schedule for e in entries} <= set(space.candidates) and base in space.candidates


def test_default_spaces_contain_fused_tiles() -> None:
    """Short sequences at head_dim 64 want long blocks with the next tile's first product under the epilogue."""
    _, base, space = space_of("fa3", 64)
    wanted = {"tile_q": 128, "consumers": 2, "tile_kv": 128, "stages": 4, "overlap": "within", "reference": "stale"}
    assert base.replace(**wanted, fuse_tiles=True) in space.candidates and base.replace(**wanted) in space.candidates


@pytest.mark.parametrize(
    ("name", "head_dim", "mask"),
    [("fa2", 64, "causal"), ("fa2", 128, "full"), ("fa3", 64, "full"), ("fa3", 128, "full"), ("fa3", 256, "full"), ("fa3_fp8", 128, "causal")],
)  # fmt: skip
def test_every_built_in_has_a_default_space_of_legal_schedules(name: str, head_dim: int, mask: str) -> None:
    attention, _, space = space_of(name, head_dim, mask)
    assert len(space.candidates) >= 5 and len(set(space.candidates)) == len(space.candidates)
    for schedule in space.candidates[::40]:
        tuned.check(attention, schedule)


def test_illegal_combinations_are_counted_by_code() -> None:
    space = enumerate_space(FULL, FA3, {"tile_kv": (96, 100, 128), "stages": (1, 2, 3, 9)})
    assert space.combinations == 12 and space.enumerated == 12 + 4  # fa3 itself has 176 keys, and three neighbours by its stages
    assert space.illegal == {"tile-kv": 4, "stages": 4, "smem": 1}
    wanted = {(176, 1), (176, 2)} | {(tile_kv, stages) for tile_kv in (96, 128) for stages in (1, 2, 3)}
    assert {(s.tile_kv, s.stages) for s in space.candidates} == wanted


def test_tile_q_follows_the_consumers_unless_it_is_asked_for() -> None:
    attention, base = load("fa3", head_dim=64)
    followed = enumerate_space(attention, base, {"consumers": (1, 2, 3), "tile_kv": (64,), "overlap": ("within",)})
    assert {(s.consumers, s.tile_q) for s in followed.candidates} == {(1, 64), (2, 128), (3, 192)}
    asked = enumerate_space(attention, base, {"consumers": (2, 3), "tile_q": (128, 192)})
    assert {(s.consumers, s.tile_q) for s in asked.candidates} == {(2, 128), (3, 192)} and asked.illegal == {"tile-q": 2}


def test_more_schedules_join_once_and_known_ones_are_left_out() -> None:
    known = FA3.replace(tile_kv=112, stages=1)
    space = enumerate_space(FULL, FA3, {"stages": (1, 2)}, (known, FA3))
    assert {s.tile_kv for s in space.candidates} == {176, 112} and len(space.candidates) == 3
    without = enumerate_space(FULL, FA3, {"stages": (1, 2)}, (known,), exclude=[FA3, known])
    assert [s.stages for s in without.candidates] == [1] and without.excluded == 2
    with pytest.raises(InputError, match="--exclude-known: leaves nothing: all 1 legal schedules are known"):
        enumerate_space(FULL, FA3, {"stages": (2,)}, exclude=[FA3])


def test_a_large_space_is_sampled_by_seed_with_the_neighbours_of_the_start() -> None:
    axes = default_axes(FULL, FA3)
    some = enumerate_space(FULL, FA3, axes, most=200, seed=1)
    assert some.combinations == 9216 and 100 < some.enumerated < 260
    assert some == enumerate_space(FULL, FA3, axes, most=200, seed=1) != enumerate_space(FULL, FA3, axes, most=200, seed=2)
    assert {FA3.replace(stages=1), FA3.replace(overlap="within")} <= set(some.candidates)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"tile_kv": ()}, "tile_kv: has no values"),
        (
            {"tile_kv": (100,), "tile_q": (64,)},
            "none of 2 schedules is legal for hd128 bf16 full; the given one itself: \\[tile-kv\\]",
        ),
    ],
)
def test_a_space_without_candidates_is_refused(axes: dict[str, Any], message: str) -> None:
    base = FA3.replace(tile_kv=100)
    with pytest.raises(InputError, match=message):
        enumerate_space(FULL, base, axes)


def test_verification_covers_what_breaks_kernels() -> None:
    problems = verify_problems(FULL, FA3)
    assert {"normal", "sink", "growing"} <= {p.inputs for p in problems}
    assert any(p.sk == 0 for p in problems) and any(p.sq > p.sk > 0 for p in problems) and any(p.hq > p.hkv for p in problems)
    assert any(p.batch * p.hq >= 132 for p in problems) and len(problems) < 20
    assert "descaled" in {p.inputs for p in verify_problems(Attention(head_dim=128, dtype="e4m3"), load("fa3_fp8").schedule)}


# the workshop: compiling in processes -----------------------------------------------------------------------------------------


def compile_with_faults(request: Mapping[str, Any], channel: Any) -> None:
    """A compile task whose compiler dies at some candidates (run in the worker)."""
    for job in request["jobs"]:
        channel.doing(f"{job['name']} is compiled", 60)
        if job["schedule"]["tile_kv"] in (96, 144):
            os.abort()
        channel.send("done_one", name=job["name"], answer="")


def test_a_compiler_that_crashes_costs_its_candidate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setattr(tune_run, "COMPILE_TASK", "test_tune:compile_with_faults")
    monkeypatch.setattr(tune_run, "MOST_AT_ONCE", 3)
    heard: list[str] = []
    candidates = [Candidate(f"c.{t}", FA3.replace(tile_kv=t)) for t in (80, 96, 112, 128, 144, 160)]
    reasons = Workshop(tmp_path, 1).compile(FULL, candidates, heard.append, lambda: False)
    broken = {n: why.reason for n, why in reasons.items() if why}
    assert set(broken) == {"c.96", "c.144"}
    assert "signal SIGABRT" in broken["c.96"] and broken["c.96"].startswith("c.96 is compiled")
    assert sorted(heard) == sorted(reasons) == sorted(c.name for c in candidates)


def test_candidates_are_built_for_another_machine(tmp_path: Path) -> None:
    candidates = [Candidate(f"c.{t}", FA3.replace(tile_kv=t)) for t in (80, 100)]
    reasons = Workshop(tmp_path, 2).compile(FULL, candidates, silent, lambda: False)
    failure = reasons["c.100"]
    assert reasons["c.80"] is None and failure is not None and "[tile-kv]" in failure.reason
    assert {p.name for p in tmp_path.iterdir()} == {"c.80.cu", "c.80.cubin", "c.80.json"}
    assert tune_run.compiler_of(tmp_path).startswith("NVRTC")


def test_nothing_is_begun_behind_the_budget(tmp_path: Path) -> None:
    assert Workshop(tmp_path, 1).compile(FULL, [Candidate("c.80", FA3.replace(tile_kv=80))], silent, lambda: True) == {}


def test_predictions_come_in_order_from_processes(tmp_path: Path) -> None:
    schedules = [FA3.replace(tile_kv=t) for t in (64, 100, 176)]
    slow, none, fast = Workshop(tmp_path, 2).predict(FULL, schedules, [LONG], silent)
    assert isinstance(slow, list) and isinstance(fast, list) and slow[0] > fast[0] > 100
    assert isinstance(none, str) and "[tile-kv]" in none


# the workshop: on a GPU that is made up -----------------------------------------------------------------------------------------


def built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_run, "load_built", lambda folder, name: name)


RIGHT, WRONG = Verdict(True, 0.1, 1.0, 0.1), Verdict(False, 2.0, 1.0, 2.0, "error 2 is above the bound 1")
CANDIDATES = [Candidate(f"c.{t}", FA3.replace(tile_kv=t)) for t in (80, 96, 112, 128)]


def test_verification_goes_on_behind_a_kernel_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built(monkeypatch)
    runs: list[list[str]] = []

    def check_gpu(items: Any, builts: Any, *, seed: int, bundles: Any, on_result: Callable[[CheckResult], None]) -> Any:
        assert builts == [i.name for i in items]
        runs.append([i.name for i in items])
        for item in items:
            for n, problem in enumerate(item.problems):
                if item.name == "c.96" and n == 2:
                    failure = GuardError("hang", "launch of c.96", "no sign of life for 20 s")
                    failure.bundle = "repro/c.96"
                    raise LaunchError("launch of c.96 hangs\nrepro bundle: repro/c.96") from failure
                on_result(CheckResult(item.name, problem, "full", seed + n, WRONG if item.name == "c.128" and n == 1 else RIGHT))
        return GpuRun((), "", "", {"c.128": Path("repro/c.128")})

    monkeypatch.setattr(tune_run, "check_gpu", check_gpu)
    reasons = Workshop(tmp_path, 1).verify(FULL, CANDIDATES, silent)
    assert runs == [["c.80", "c.96", "c.112", "c.128"], ["c.112", "c.128"]]
    assert reasons["c.80"] is None and reasons["c.112"] is None
    assert reasons["c.96"] == Broken("launch of c.96 hangs", "repro/c.96")
    wrong = reasons["c.128"]
    assert wrong is not None and "error 2 is above the bound 1" in wrong.reason and wrong.bundle == "repro/c.128"


def test_a_machine_that_cannot_verify_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built(monkeypatch)

    def check_gpu(*_: Any, **__: Any) -> None:
        raise LaunchError("kernels for sm_90a run on compute capability 9.0, not on this")

    monkeypatch.setattr(tune_run, "check_gpu", check_gpu)
    with pytest.raises(LaunchError, match="compute capability"):
        Workshop(tmp_path, 1).verify(FULL, CANDIDATES, silent)


# the command --------------------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.run(["tune", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeRunner:
    """A fake GPU behind the command."""
    runner = FakeRunner({96: "does nothing"})
    monkeypatch.setattr(tune_run, "Workshop", lambda *_, **__: runner)
    monkeypatch.setattr(bench_lab, "check_device", lambda: None)
    return runner


def test_no_gpu_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def absent() -> Any:
        raise LaunchError("no GPU: the CUDA driver sees no device")

    monkeypatch.setattr(fagen.driver, "api", absent)
    code, out, err = run(capsys, "fa3", "--over", "tile_kv=96:128")
    assert (code, out, err) == (1, "", "fagen: no GPU: the CUDA driver sees no device\n")


def test_the_command_tells_winner_failures_and_legality(
    machine: FakeRunner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, output = tmp_path / "mine.json", tmp_path / "out.json"
    code, out, err = run(capsys, "fa3", "--shape", "4,16,16,4096,4096", "--over", "tile_kv=80:96:100:128", "--over", "overlap=both", "--vs", "fa3", "--table", str(table), "--output", str(output))  # fmt: skip
    assert code == 0
    assert "1 break tile-kv" in err and "1 break tile-kv" in out
    assert "verify: 1 × 128 of 128 elements of out are NaN" in out
    assert "(winner)" in out and "fa3" in out
    result = TuneResult.from_json(output.read_text())
    assert result.shapes[0].winner == f"fa3.hd128-bf16-full.{FA3.id}"
    assert "1 entry written" in err
    new = tuned.read(table)
    assert len(new.entries) == len(tuned.builtin_tables()[0].entries)
    assert tuned.choose(FULL, LONG, tuned.H200, [new]).schedule == FA3


def test_the_tables_own_schedules_are_always_among_the_candidates(machine: FakeRunner, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "fa3", "--shape", "4,16,16,4096,4096", "--over", "tile_kv=80", "--json")
    names = {c["name"] for c in json.loads(out)["prepared"]["candidates"]}
    table = [
        e for e in tuned.builtin_tables()[0].entries if e.head_dim == 128 and not e.schedule.skip_masked
    ]  # without a mask none are
    own = {t: {e.schedule_id for e in table if e.dtype == t} for t in ("bf16", "e4m3")}
    known = own["bf16"]
    assert own["e4m3"] and not any(n.endswith(i) for n in names for i in own["e4m3"] - own["bf16"])
    assert code == 0 and {f"fa3.hd128-bf16-full.{i}" for i in known} <= names


def test_built_here_and_measured_there(machine: FakeRunner, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "fa3", "--causal", "--over", "tile_kv=80:96", "--build-only", str(tmp_path))
    assert code == 0 and "candidates for hd128 bf16 causal compiled into" in out
    assert (tmp_path / "fa3.hd128-bf16-causal.tune.json").is_file() and not machine.raced
    code, out, _ = run(capsys, "fa3", "--causal", "--from", str(tmp_path), "--grid", "paper", "--json")
    result = TuneResult.from_dict(json.loads(out))
    assert code == 0 and len(result.shapes) == 6 and result.prepared.attention.mask == "causal"
    code, _, err = run(capsys, "fa3", "--from", str(tmp_path))
    assert code == 2 and "fagen tune --build-only writes it" in err


def test_a_size_without_a_winner_is_exit_code_1(machine: FakeRunner, capsys: pytest.CaptureFixture[str]) -> None:
    machine.faults = dict.fromkeys(range(257), "does nothing")
    code, out, _ = run(capsys, "fa3", "--shape", "4,16,16,4096,4096", "--over", "tile_kv=80")
    assert code == 1 and "4,16,16,4096,4096: no candidate was left" in out


def test_the_command_works_on_a_cluster(
    machine: FakeRunner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No GPU is needed here; what there is to know of the GPU comes from the workers."""
    asked: list[str] = []
    monkeypatch.setattr(tune_cluster, "connect", asked.append)
    monkeypatch.setattr(tune_cluster, "Cluster", lambda *_, **__: FakeRunner(name="NVIDIA H200 NVL"))
    monkeypatch.setattr(bench_lab, "check_device", lambda: pytest.fail("nobody needs a GPU here"))
    code, out, _ = run(
        capsys, "fa3", "--shape", "4,16,16,4096,4096", "--over", "tile_kv=80:96", "--cluster", "there:8786", "--json"
    )
    assert code == 0 and asked == ["there:8786"] and json.loads(out)["gpu"] == "NVIDIA H200 NVL"


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Bar("compiling", 2) as bar:
        bar.step("a")
    assert capsys.readouterr().err.startswith("fagen: compiling 0/2 …\n")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for total in (2, None):
        with Bar("compiling", total) as bar:
            bar.step("kernel a")
            bar.step("kernel b")
        out, err = capsys.readouterr()
        assert out == "" and "compiling" in err and ("0/2" in err or "2/2" in err or total is None)


def test_a_start_that_is_no_good_with_the_known_left_out(
    machine: FakeRunner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--set overlap=none` is the word; the table's own schedule is timed beside, and its share said; the second run reuses the records."""
    machine.speed = lambda s, p: 400.0 + s.tile_kv + 50 * s.stages_k + 100 * (s.overlap != "none") + 100 * (s.reference == "stale")
    arguments = [
        "fa3",
        "--set",
        "tile_kv=64",
        "--set",
        "stages=1",
        "--set",
        "overlap=none",
        "--exclude-known",
        "--shape",
        "4,16,16,4096,4096",
    ]
    over = ["--over", "tile_kv=64:128", "--over", "stages=1:2", "--over", "overlap=none:within", "--over", "reference=running:stale", "--over", "parallelism=persistent_dynamic:persistent_static"]  # fmt: skip
    store = ["--store", str(tmp_path / "store"), "--vs", "none", "--budget", "5m"]
    code, out, _ = run(capsys, *arguments, *over, *store)
    known = tuned.choose(FULL, LONG, tuned.H200).schedule
    assert code == 0 and f"of the tuned entry {known.id}" in out and "known ones left out" in out
    assert re.search(r"1\.\d\d × as fast as where it started", out)
    verified = len(machine.verified)
    code, out, _ = run(capsys, *arguments, *over, *store, "--resume", "--json")
    result = TuneResult.from_dict(json.loads(out))
    assert code == 0 and result.shapes[0].reused == len(result.prepared.candidates) and len(machine.verified) == verified
    assert known not in {c.schedule for c in result.prepared.candidates if not c.beside}
    assert result.prepared.start == FA3.replace(tile_kv=64, stages=1, overlap="none")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--over", "tile_kv"), "--over: 'tile_kv' is not knob=value:value"),
        (("--over", "tile_kw=96"), "did you mean tile_kv"),
        (("--over", "tile_kv=96", "--over", "tile-kv=80"), "--over: tile_kv is given twice"),
        (("--shape", "1,2,3"), "--shape: '1,2,3' is not B,HQ,HKV,SQ,SK"),
        (("--shape", "1,2,2,0,5"), "every size must be at least 1"),
        (("--grid", "papers"), "no grid 'papers'"),
        (("--vs", "fa9"), "no peer 'fa9'"),
        (("--build-only", "x", "--from", "y"), "one of them is enough"),
        (("--build-only", "x", "--table", "t.json"), "--build-only: measures nothing"),
        (("--build-only", "x", "--store", "s"), "--build-only: measures nothing"),
        (("--resume",), "--resume: needs the --store"),
        (("--store", "/dev/null/x"), "--store: /dev/null/x cannot be used"),
        (("--budget", "soon"), "--budget: 'soon' is not a time, such as 300s or 5m"),
        (("--budget", "0s"), "--budget: '0s' is not a time"),
        (("--from", "y", "--exclude-known"), "--exclude-known: has no effect on candidates that are compiled already"),
        (("--exclude-known", "--over", "stages=2"), "--exclude-known: leaves nothing"),
        (("--from", "/nowhere"), "there is no folder /nowhere"),
        (("--build-only", "/dev/null/x"), "--build-only: /dev/null/x cannot be made"),
        (("--output", "/nowhere/x.json"), "--output: /nowhere/x.json cannot be written"),
        (
            ("--set", "head_dim=80", "--over", "stages=1:2"),
            "none of 2 schedules is legal for hd80 bf16 full; the given one itself: [head-dim]",
        ),
    ],
)
def test_mistakes_on_the_command_line(arguments: tuple[str, ...], message: str, machine: FakeRunner, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "fa3", *arguments)
    assert code == 2 and out == "" and message in err, err


def test_a_table_is_for_hopper_schedules(machine: FakeRunner, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, "fa2", "--table", str(tmp_path / "t.json"))
    assert code == 2 and "--table: holds schedules for sm_90a; fa2 is for sm_90" in err
