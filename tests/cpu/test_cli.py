"""The command line: exit codes, clean --json, one sentence for a mistake, and what each command writes."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fp8_steps import PAPER_FP8

from fagen import Attention, InputError, Schedule, evidence, npz, tuned
from fagen.check import reason_no_gpu
from fagen.cli import COMMANDS, MODULES, ls, needed, run
from fagen.cli import check as check_command
from fagen.cli.common import parse_settings, parse_value, select, variants_of
from fagen.compile import load_built
from fagen.emit import emit
from fagen.library import builtin_names, chain_names, load
from fagen.oracle import CheckProblem, make_inputs, reference, transpose_v
from fagen.plan import Problem, plan

ROOT = Path(__file__).resolve().parent.parent.parent
NO_GPU = pytest.mark.skipif(not reason_no_gpu(), reason="there is a GPU here")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FAGEN_REQUIRE_EVIDENCE", raising=False)
    return tmp_path


def test_no_command_hides_a_name_of_the_package() -> None:
    """A module of the package that is imported becomes its attribute: `fagen.cli.run` has to stay the function."""
    modules = [f"fagen.cli.{MODULES.get(name, name)}" for name in COMMANDS]
    code = f"import fagen.cli as c; own = set(vars(c)); import {', '.join(modules)}; print(callable(c.run), [m for m in {modules} if m[10:] in own])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "True []\n", done.stderr


class Outcome:
    def __init__(self, code: int, out: str, err: str):
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def fagen(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command line in this process."""

    def call(*arguments: str) -> Outcome:
        capsys.readouterr()
        code = run(arguments)
        out, err = capsys.readouterr()
        assert "Traceback" not in err, err
        return Outcome(code, out, err)

    return call


def process(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "fagen", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, **options)


# usage --------------------------------------------------------------------------------------------------------------------


def test_version_and_help(fagen: Any) -> None:
    assert fagen("--version").out == "fagen 0.1.0\n"
    answer = fagen("--help")
    assert answer.code == 0 and all(name in answer.out for name in COMMANDS)
    for name in COMMANDS:
        answer = fagen(name, "--help")
        assert answer.code == 0 and answer.out.startswith(f"Usage: fagen {name}") and not answer.err
    for arguments in ((), ("cache",)):
        answer = fagen(*arguments)
        assert answer.code == 2 and not answer.out and "Usage: fagen" in answer.err


def test_help_imports_neither_numpy_nor_rich() -> None:
    code = "import sys; from fagen.cli import run; run(['--help']); print({'numpy', 'rich', 'jinja2', 'cuda'} & set(sys.modules))"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert answer.stdout.endswith("set()\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chekc", "fa3"], "no command 'chekc'; did you mean check"),
        (["build"], "Missing argument 'SCHEDULE"),
        (["build", "fa4"], "fa4: no such schedule file or name; did you mean"),
        (["build", "."], ".: is a folder, not a schedule file"),
        (["build", "fa3", "--set", "tile_kv"], "--set: 'tile_kv' is not knob=value"),
        (["build", "fa3", "--set", "tilekv=96"], "--set: no knob 'tilekv' in an attention or a schedule; did you mean tile_kv"),
        (["build", "fa3", "--set", "source=1"], "--set: no knob 'source'"),
        (["build", "fa3", "--set", "tile_kv=96", "--set", "tile_kv=112"], "--set: tile_kv is given twice: 96 and 112"),
        (["build", "fa3", "--set", "tile_kv=100"], "[tile-kv] tile_kv: 100 is not a multiple of 16"),
        (["check", "fa3", "--set", "head_dim=80"], "[head-dim] head_dim: 80 is not supported"),
        (["check", "fa3", "--set", "mask=full", "--causal"], "--causal: contradicts --set mask=full"),
        (["check", "fa3", "--shape", "1,3,2,64,64"], "3 query heads are not a multiple of 2 KV heads"),
        (["check", "fa3", "--device", "tpu"], "'tpu' is not one of"),
        (["check", "fa3", "--device", "cpu", "--jitter", "3"], "--jitter: speaks of compiled kernels on a GPU"),
        (["check", "fa3", "--device", "cpu", "--from", "."], "--from: speaks of compiled kernels"),
        (["check", "fa3", "--device", "cpu", "--evidence", "x.json"], "--evidence: speaks of compiled kernels"),
        (["run", "fa3", "--input", "q.npz"], "Missing option '--output'"),
        (["run", "fa3", "--input", "none.npz", "--output", "o.npz", "--device", "cpu"], "none.npz: no such file"),
        (["run", "fa3", "--input", "x", "--output", "o", "--source", "a.cu", "--from", "."], "--source: is compiled, --from takes"),
        (["explain", "fa3", "--set", "warps=4", "--no-compile"], "fa3 (hd128 bf16 full) is not legal:"),
        (["prove", "fa3", "--set", "stages=9"], "[stages] stages: 9"),
        (["repro", "nowhere"], "nowhere: is not a repro bundle"),
        (["ls", "--jsn"], "No such option"),
        (["check", "fa3", "--grid", "paper"], "--grid: chooses among the kernels of `tuned`"),
        (["check", "tuned", "--grid", "papers", "--device", "cpu"], "papers"),
        (["check", "tuned", "--variants"], "--variants: given beside tuned"),
        (["check", "tuned", "--evidence", "x.json"], "--evidence: one file holds one schedule's"),
        (["check", "tuned", "--set", "dtype=fp16"], "tuned: the tuned table has no usable entry with dtype=fp16"),
        (["explain", "tuned"], "--shape: is needed"),
        (["build", ""], "source: is empty; built-in schedules: fa1, fa2"),
        (["build", "chain/fa9"], "chain/fa9: no such schedule file or name; "),
        (["build", "chain/"], "steps: chain/fa1_to_fa2_1_normalise_once, "),
        (
            ["diff", "fa1", "tuned"],
            "tuned: no such schedule file or name; it stands for the table of tuned schedules in build, check",
        ),
        (["prove", "tuned"], "tuned: no such schedule file or name; it stands for the table"),
        (["build", "fa3", "--set", "tile_q=1" + "0" * 400], "[tile-q] tile_q: 1000"),
        (["check", "fa1", "--device", "cpu", "--shape", "1,1,1,1073741824,1"], "has a size outside 0 … 2^30 − 1"),
        (["explain", "fa1", "--shape", "0,2,2,5,5"], "--shape: '0,2,2,5,5' has no rows of Q"),
        (["explain", "standard", "--shape", "1,2,2,0,5"], "--shape: '1,2,2,0,5' has no rows of Q"),
        (["explain", "tuned", "--shape", "1,0,0,5,5"], "--shape: '1,0,0,5,5' has no rows of Q"),
        (["bench", "fa3", "--set", "tile_q=7"], "[tile-q] tile_q: 7"),
        (["bench", "tuned", "--set", "tile_q=7"], "[tile-q] tile_q: 7"),
        (["bench", "standard", "fa1", "--rounds", "0"], "--rounds: 0; at least 1"),
        (["bench", "tuned", "--shape", "1,0,0,5,5"], "--shape: 1,0,0,5,5: every size must be at least 1"),
    ],
)
def test_a_mistake_is_one_message_and_exit_2(arguments: list[str], message: str, fagen: Any, here: Path) -> None:
    answer = fagen(*arguments)
    assert answer.code == 2 and answer.out == ""
    assert message in answer.err and answer.err.startswith("fagen: ")
    assert list(here.iterdir()) == [], "nothing is written"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = (", "line 1: '(' was never closed"),
        ("attention = 1", "must define `attention`, a fagen.Attention; it is a int"),
        ("1 / 0", "line 1: ZeroDivisionError: division by zero"),
        ("from fagen import Schedule\nSchedule(tile=3)", "line 2: TypeError"),
    ],
)
def test_a_broken_schedule_file_is_named(text: str, message: str, fagen: Any, here: Path) -> None:
    (here / "mine.py").write_text(text)
    for command in ("build", "check", "prove", "explain"):
        answer = fagen(command, "mine.py")
        assert answer.code == 2 and answer.err.startswith("fagen: mine.py: ") and message in answer.err


@NO_GPU
def test_a_gpu_that_is_not_there_is_said_in_one_line(fagen: Any, here: Path) -> None:
    answer = fagen("check", "fa3", "--device", "gpu", "--shape", "1,1,1,64,64")
    assert answer.code == 1 and answer.err.startswith("fagen: no GPU: ") and answer.err.count("\n") == 1
    answer = fagen("run", "fa3", "--input", "x.npz", "--output", "y.npz", "--device", "gpu")
    assert answer.code == 1 and answer.err.startswith("fagen: no GPU: ")


def test_a_fault_of_ours_shows_where_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from fagen.cli import prove

    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(prove.common, "select", broken)
    assert run(["prove", "fa3"]) == 70
    err = capsys.readouterr().err
    assert "Traceback" in err and "fault of fagen, not yours" in err


def test_a_reader_that_goes_away_is_no_error() -> None:
    with process("explain", "fa3", "--no-compile", "--json") as p:
        assert p.stdout is not None and p.stderr is not None
        p.stdout.close()
        err = p.stderr.read()
    assert p.returncode == 141 and "Traceback" not in err and "Exception" not in err


def test_an_interrupt_is_exit_130() -> None:
    listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # what runs in a shell's background is born deaf to it
    with process("check", "fa2", "fa3", "--device", "cpu", "--variants", preexec_fn=listen) as p:
        assert p.stderr is not None
        assert "simulating" in p.stderr.readline()
        time.sleep(0.5)
        p.send_signal(signal.SIGINT)
        err = p.stderr.read()
    assert p.returncode == 130 and "Traceback" not in err and err.rstrip().endswith("fagen: interrupted")


def test_an_interrupt_while_a_library_starts_is_one_too(fagen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a progress bar does, whose thread cannot be joined before it was started."""

    def half_started(*_: Any, **__: Any) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("cannot join thread before it is started")

    monkeypatch.setattr("fagen.cli.cli.main", half_started)
    answer = fagen("ls")
    assert (answer.code, answer.err) == (130, "fagen: interrupted\n")


# settings and names -------------------------------------------------------------------------------------------------------


def test_values_of_settings() -> None:
    texts = {
        "128": 128,
        "0.5": 0.5,
        "true": True,
        "False": False,
        "none": None,
        "2,3": (2, 3),
        "causal": "causal",
        " 7 ": 7,
        "-1": -1,
    }
    assert {t: parse_value(t) for t in texts} == texts
    assert parse_value("(40, 232)") == (40, 232), "as messages print it"
    assert parse_settings(["tile-kv=96", "stages=2,3", "scale=0.5"], causal=True) == {
        "tile_kv": 96,
        "stages": (2, 3),
        "scale": 0.5,
        "mask": "causal",
    }
    assert parse_settings(["overlap=none", "promote_every=none"]) == {"overlap": "none", "promote_every": None}


def test_every_field_of_both_values_can_be_set() -> None:
    for value in (Attention(head_dim=64), load("fa3").schedule):
        for name, now in value.to_dict().items():
            text = "none" if now is None else ",".join(map(str, now)) if isinstance(now, list) else str(now)
            (changed,) = parse_settings([f"{name}={text}"]).values()
            assert changed == getattr(value, name)


def test_names_say_what_changed() -> None:
    def name(*settings: str, source: str = "fa3") -> str:
        return select([source], settings)[0].name

    own = load("fa3")
    assert name() == "fa3"
    assert name(f"head_dim={own.attention.head_dim}", f"tile_kv={own.schedule.tile_kv}") == "fa3", "nothing changed"
    assert name("head_dim=64", "dtype=fp16", "mask=causal") == "fa3.hd64-fp16-causal"
    tile = f"fa3.{own.schedule.replace(tile_kv=96).id}"
    assert name("tile_kv=96") == tile
    assert name("tile_kv=96", "mask=causal") == tile.replace("fa3.", "fa3.hd128-bf16-causal.")


def test_tiles_of_another_head_dim_are_told(fagen: Any) -> None:
    answer = fagen("explain", "fa3", "--set", "head_dim=64", "--no-compile")
    assert "fagen: fa3 at head_dim 64 takes the file's tile_q=192" in answer.err
    assert "takes the file's" not in fagen("explain", "fa3", "--no-compile").err


def test_variants_cover_the_grid_and_respect_settings() -> None:
    chosen = select(["fa2"], variants=True)
    assert len(chosen) == 12 == len({c.name for c in chosen})
    assert [c.variant for c in chosen].count(None) == 1
    assert {c.attention.mask for c in select(["fa2"], causal=True, variants=True)} == {"causal"}
    assert len(select(["fa2"], ["head_dim=64", "dtype=fp16"], variants=True)) == 2
    fp8 = Attention(head_dim=64, dtype="e4m3")
    assert {v["out_dtype"] for v in variants_of(fp8.replace(out_dtype="fp16"))} == {"bf16", "fp16"}
    assert fp8 in [fp8.replace(**v) for v in variants_of(fp8)]
    chosen = select(["fa3_fp8"], variants=True)
    assert len(chosen) == 12 and [c.variant for c in chosen].count(None) == 1
    assert {(c.attention.head_dim, c.attention.dtype, c.attention.out_dtype, c.attention.mask) for c in chosen} == set(
        product((64, 128, 256), ("e4m3",), ("bf16", "fp16"), ("full", "causal"))
    )
    with pytest.raises(InputError, match="two of the schedules"):
        select(["fa2", str(ROOT / "schedules" / "fa2.py")])


# build --------------------------------------------------------------------------------------------------------------------


def test_build_writes_three_files_that_load_again(fagen: Any, here: Path) -> None:
    answer = fagen("build", "fa2", "-o", "out", "--set", "head_dim=64", "--json")
    assert answer.code == 0
    (facts,) = answer.json
    name = "fa2.hd64-bf16-full"
    assert facts["name"] == name and [Path(f).name for f in facts["files"]] == [f"{name}{e}" for e in (".cu", ".cubin", ".json")]
    ready = load_built("out", name)
    assert facts["code_sha256"] == ready.source.code_sha256
    assert facts["report"] == ready.report.to_dict()
    answer = fagen("build", "fa2", "-o", "out", "--set", "head_dim=64")
    assert answer.code == 0 and "(cached)" in answer.out and "HMMA" in answer.out and "0 B" in answer.out
    assert "compiling" in answer.err


def test_build_of_a_users_file(fagen: Any, here: Path) -> None:
    (here / "mine.py").write_text(
        textwrap.dedent("""
            from fagen import Attention, Schedule, load
            print("what a file prints must not disturb --json")
            attention, schedule = load("fa2", head_dim=64)
        """)
    )
    answer = fagen("build", "mine.py", "-o", ".", "--json")
    assert answer.code == 0 and answer.json[0]["name"] == "mine"
    assert {p.name for p in here.iterdir()} == {"mine.py", "mine.cu", "mine.cubin", "mine.json"}


def test_a_debug_build_has_its_own_name(fagen: Any, here: Path) -> None:
    answer = fagen("build", "fa2", "-o", ".", "--debug", "--set", "head_dim=64", "--json")
    assert answer.code == 0, answer.err
    assert answer.json[0]["name"] == "fa2.hd64-bf16-full.debug"
    assert load_built(".", "fa2.hd64-bf16-full.debug").plan.debug


def test_an_unusable_folder(fagen: Any, here: Path) -> None:
    (here / "file").write_text("")
    answer = fagen("build", "fa2", "-o", "file", "--set", "head_dim=64")
    assert answer.code == 2 and "file" in answer.err.splitlines()[-1]


# check --------------------------------------------------------------------------------------------------------------------


def test_check_in_the_simulator(fagen: Any) -> None:
    arguments = ("check", "fa3", "--device", "cpu", "--causal", "--shape", "1,4,2,70,65", "--shape", "2,2,1,5,2", "--seed", "3")
    answer = fagen(*arguments, "--json")
    assert answer.code == 0
    data = answer.json
    assert (data["device"], data["seed"], data["passed"], data["failed"]) == ("cpu", 3, 2, 0)
    assert [c["shape"] for c in data["cases"]] == [[1, 4, 2, 70, 65], [2, 2, 1, 5, 2]]
    assert all(c["passed"] and c["mask"] == "causal" and 0 <= c["error"] <= c["bound"] for c in data["cases"])
    answer = fagen(*arguments)
    assert answer.code == 0 and "1,4,2,70,65" in answer.out and "2 of 2 cases passed (simulator, seed 3)" in answer.out


def test_a_problem_beyond_the_memory_is_no_fault_of_ours(fagen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise MemoryError("Unable to allocate 3.64 TiB")

    monkeypatch.setattr("fagen.check.check_cpu", full)
    answer = fagen("check", "standard", "--device", "cpu", "--shape", "1,1,1,1000000,1000000")
    assert answer.code == 1 and answer.out == ""
    assert "fagen: this machine has too little memory for sizes like these: Unable to allocate 3.64 TiB" in answer.err


def test_check_uses_fresh_inputs_and_tells_their_seed(fagen: Any) -> None:
    answers = [fagen("check", "fa2", "--device", "cpu", "--shape", "1,1,1,9,9", "--json").json for _ in range(2)]
    assert answers[0]["seed"] != answers[1]["seed"] and answers[0]["cases"][0]["error"] != answers[1]["cases"][0]["error"]
    again = fagen("check", "fa2", "--device", "cpu", "--shape", "1,1,1,9,9", "--json", "--seed", str(answers[0]["seed"])).json
    assert again["cases"] == answers[0]["cases"]


def test_a_failed_case_is_exit_1_and_says_where(fagen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fagen.check import judge

    honest = judge.simulate

    def wrong(*arguments: Any, **options: Any) -> Any:
        out, lse = honest(*arguments, **options)
        out[0, 2, 0, 1] = 7
        return out, lse

    monkeypatch.setattr(judge, "simulate", wrong)
    answer = fagen("check", "fa2", "fa3", "--device", "cpu", "--shape", "1,1,1,9,9")
    assert answer.code == 1
    assert answer.out.count("out[0, 2, 0, 1] is 7 where the reference has") == 2 and "0 of 2 cases passed" in answer.out
    answer = fagen("check", "fa2", "--device", "cpu", "--shape", "1,1,1,9,9", "--json")
    assert answer.code == 1 and answer.json["failed"] == 1 and "out[0, 2, 0, 1] is 7" in answer.json["cases"][0]["reason"]


def test_check_from_refuses_kernels_of_another_schedule(fagen: Any, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fagen("build", "fa2", "-o", "built", "--set", "head_dim=64").code == 0
    monkeypatch.setattr(check_command.common, "choose_device", lambda asked: "gpu")
    answer = fagen("check", "fa2", "--from", "built")
    assert answer.code == 2 and "built/fa2.json: cannot be read" in answer.err
    for end in (".cu", ".cubin", ".json"):
        (here / "built" / f"fa2.hd64-bf16-full{end}").rename(here / "built" / f"fa2{end}")
    answer = fagen("check", "fa2", "--from", "built")
    assert answer.code == 2 and "was built for head_dim=64 (wanted 128)" in answer.err


def test_check_from_needs_no_compiler_and_writes_evidence(fagen: Any, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of a GPU machine: kernels built elsewhere, evidence written. The GPU itself is played."""
    from fagen import check, nvrtc
    from fagen.check import CaseResult, GpuRun
    from fagen.oracle import Verdict

    variant = ("--set", "head_dim=64", "--set", "dtype=fp16")
    assert fagen("build", "fa2", "-o", "generated").code == 0
    assert fagen("build", "fa2", "-o", "generated", *variant).code == 0

    def none(*_: Any, **__: Any) -> Any:
        raise AssertionError("NVRTC is asked for")

    monkeypatch.setattr(nvrtc, "compiler", none)
    monkeypatch.setattr(nvrtc, "_nvrtc", none)
    monkeypatch.setattr(check_command.common, "choose_device", lambda asked: "gpu")

    def play(items: Any, builts: Any, *, seed: int, repeat: int, jitter: bool, timeout: float, on_result: Any) -> GpuRun:
        good = Verdict(True, 0.001, 0.004, 0.25)
        results = [CaseResult(i.name, p, i.attention.mask, seed + n, good, repeat) for i in items for n, p in enumerate(i.problems)]
        for r in results:
            on_result(r)
        return GpuRun(tuple(results), "NVIDIA H200", "580.95.05, CUDA 13.0", {})

    monkeypatch.setattr(check, "check_gpu", play)
    path = "generated/fa2.json"
    for settings in ((), variant):
        assert fagen("check", "fa2", *settings, "--from", "generated", "--evidence", path).code == 0
    record = evidence.read(path)
    own, other = load("fa2"), load("fa2", head_dim=64, dtype="fp16")
    assert evidence.state(record, emit(plan(*own)).code_sha256, min_cases=60) == "fresh"
    assert evidence.state(record, emit(plan(*other)).code_sha256, "hd64-fp16-full", min_cases=60) == "fresh"
    assert record["evidence"]["gpu"] == "NVIDIA H200" and record["evidence"]["compiler"].startswith("NVRTC ")
    rows = {r["name"]: r for r in fagen("ls", "--json").json}
    assert rows["fa2"]["evidence"] == "fresh" and rows["fa2"]["variants"]["hd64-fp16-full"] == "fresh"
    assert rows["fa3"]["evidence"] == "none"

    answer = fagen("check", "fa2", "--from", "generated", "--jitter", "5", "--evidence", path)
    assert answer.code == 2 and "fa2.debug.json: cannot be read" in answer.err
    for clash in (["--set", "tile_kv=96"], ["--shape", "1,1,1,5,5"]):
        answer = fagen("check", "fa2", "--from", "generated", *clash, "--evidence", path)
        assert answer.code == 2 and answer.err.startswith("fagen: --evidence: ")


# run ----------------------------------------------------------------------------------------------------------------------


def save(path: Path, dtype: Any = ml_dtypes.bfloat16, sq: int = 9, sk: int = 20) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, h, 64)).astype(dtype) for n, h in ((sq, 4), (sk, 2), (sk, 2)))
    if dtype == ml_dtypes.bfloat16:
        bits = {n: x.view(np.uint16) for n, x in zip("qkv", (q, k, v))}
        np.savez(path, **bits, q_dtype="bf16", k_dtype="bf16", v_dtype="bf16")
    else:
        np.savez(path, q=q, k=k, v=v)
    return q, k, v


def test_run_in_the_simulator_round_trips(fagen: Any, here: Path) -> None:
    q, k, v = save(here / "qkv.npz")
    arguments = ("run", "fa3", "--input", "qkv.npz", "--output", "out.npz", "--device", "cpu", "--set", "head_dim=64", "--causal")
    answer = fagen(*arguments, "--json")
    assert answer.code == 0
    assert answer.json["out"] == [2, 9, 4, 64] and answer.json["lse"] == [2, 4, 9] and answer.json["device"] == "cpu"
    with np.load("out.npz") as saved:
        assert str(saved["out_dtype"]) == "bf16"
        out, lse = saved["out"].view(ml_dtypes.bfloat16), saved["lse"]
    want, want_lse = reference(Attention(head_dim=64, mask="causal"), q, k, v)
    np.testing.assert_allclose(out.astype(np.float64), want, atol=0.02)
    np.testing.assert_allclose(lse, want_lse, atol=1e-4)
    assert "out.npz: out (2, 9, 4, 64), lse (2, 4, 9) by fa3.hd64-bf16-causal on the simulator" in fagen(*arguments).out


@pytest.mark.parametrize("v_transposed", [False, True])
def test_run_takes_e4m3_and_descales(v_transposed: bool, fagen: Any, here: Path) -> None:
    attention = load(PAPER_FP8, head_dim=64, v_transposed=v_transposed).attention
    q, k, v = make_inputs(attention, CheckProblem(2, 9, 20, 4, 2))
    scales = {"q_descale": np.array([[0.5, 3], [1, 2]], np.float32), "v_descale": np.array(0.25, np.float32)}
    npz.write("qkv.npz", {"q": q, "k": k, "v": transpose_v(v) if v_transposed else v, **scales})
    knobs = ("--set", "head_dim=64", "--set", f"v_transposed={str(v_transposed).lower()}")
    arguments = ("run", PAPER_FP8, "--input", "qkv.npz", "--output", "out.npz", "--device", "cpu", *knobs)
    assert fagen(*arguments, "--json").json["out"] == [2, 9, 4, 64]
    got = npz.read("out.npz", ("out", "lse"))
    want, want_lse = reference(attention, q, k, v, **scales)
    np.testing.assert_allclose(got["out"].astype(np.float64), want, atol=0.02)
    np.testing.assert_allclose(got["lse"], want_lse, atol=2e-3)  # e4m3 scores are sums of 13 bits
    answer = fagen(*arguments[:-3], f"v_transposed={str(not v_transposed).lower()}", "--set", "head_dim=64")
    assert answer.code == 2 and "v: has shape" in answer.err
    npz.write("qkv.npz", {"q": q, "k": k, "v": v, "k_descale": np.ones((2, 4), np.float32)})
    answer = fagen(*arguments[:-4], *knobs[:2])
    assert answer.code == 2 and "k_descale: has shape (2, 4); expected (2, 2) (batch, kv_heads)" in answer.err
    answer = fagen("run", "fa3", *arguments[2:-4], *knobs[:2], "--cast")
    assert answer.code == 2 and "has a k_descale, but the attention takes bf16" in answer.err


def test_check_of_e4m3_in_the_simulator(fagen: Any, here: Path) -> None:
    shapes = ("--shape", "2,4,2,70,331", "--shape", "1,2,1,5,0")
    for name, knob in (("fa3_fp8", "v_transposed=false"), (PAPER_FP8, "v_transposed=true"), ("fa3_fp8", "out_dtype=fp16")):
        answer = fagen("check", name, "--device", "cpu", "--set", "head_dim=64", "--set", knob, *shapes, "--causal", "--json")
        assert (answer.code, answer.json["passed"], answer.json["failed"]) == (0, 2, 0)


def test_run_casts_only_when_told(fagen: Any, here: Path) -> None:
    save(here / "qkv.npz", np.float32)
    arguments = ("run", "fa2", "--input", "qkv.npz", "--output", "out.npz", "--device", "cpu", "--set", "head_dim=64")
    answer = fagen(*arguments)
    assert answer.code == 2 and "q is fp32, the attention's dtype is bf16; --cast converts it" in answer.err
    assert not (here / "out.npz").exists()
    assert fagen(*arguments, "--cast").code == 0


def test_run_refuses_minutes_unless_forced(fagen: Any, here: Path) -> None:
    save(here / "qkv.npz", sq=60000, sk=20000)
    answer = fagen("run", "fa2", "--input", "qkv.npz", "--output", "out.npz", "--device", "cpu", "--set", "head_dim=64")
    assert answer.code == 2 and "simulating 2,4,2,60000,20000 takes about" in answer.err and "--force" in answer.err


@pytest.mark.parametrize("output", ["missing/out.npz", "."])
def test_run_looks_at_the_output_before_it_works(output: str, fagen: Any, here: Path) -> None:
    save(here / "qkv.npz")
    answer = fagen("run", "fa2", "--input", "qkv.npz", "--output", output, "--device", "cpu", "--set", "head_dim=64")
    assert answer.code == 2 and answer.err.splitlines()[-1].startswith(f"fagen: {output}: ")


def test_run_does_not_replace_its_input(fagen: Any, here: Path) -> None:
    save(here / "qkv.npz")
    before = (here / "qkv.npz").read_bytes()
    answer = fagen("run", "fa2", "--input", "qkv.npz", "--output", "./qkv.npz", "--device", "cpu", "--set", "head_dim=64")
    assert answer.code == 2 and "--output: ./qkv.npz is the input" in answer.err
    assert (here / "qkv.npz").read_bytes() == before


def test_run_compiles_an_edited_source(here: Path, monkeypatch: pytest.MonkeyPatch, fagen: Any) -> None:
    """Up to the launch, which is played: the edited text is what is compiled, with the same plan."""
    from fagen.cli import run_command

    assert fagen("build", "fa2", "-o", ".", "--set", "head_dim=64").code == 0
    text = (here / "fa2.hd64-bf16-full.cu").read_text()
    (here / "edited.cu").write_text(text.replace("extern", "// mine\nextern", 1))
    seen: list[Any] = []

    def play(built: Any, *_: Any, **__: Any) -> dict[str, Any]:
        seen.append(built)
        return {"out": [1], "lse": [1], "gpu": "NVIDIA H200"}

    monkeypatch.setattr(run_command, "on_gpu", play)
    monkeypatch.setattr(run_command.common, "choose_device", lambda asked: "gpu")
    arguments = ("run", "fa2", "--input", "qkv.npz", "--output", "out.npz", "--set", "head_dim=64", "--source")
    assert fagen(*arguments, "edited.cu").code == 0
    (built,) = seen
    assert "// mine" in built.source.text and built.plan == plan(*load("fa2", head_dim=64))
    (here / "broken.cu").write_text(text.replace("const", "konst", 1))
    answer = fagen(*arguments, "broken.cu")
    assert answer.code == 1 and "konst" in answer.err and "broken.cu(" in answer.err
    assert fagen(*arguments, "none.cu").code == 2


# the tuned table ----------------------------------------------------------------------------------------------------------


def tuned_kernels(**wanted: Any) -> set[tuple[Attention, Schedule]]:
    """Of the entries that have the fields wanted."""
    entries = [e for t in tuned.builtin_tables() for e in t.entries if all(getattr(e, n) == v for n, v in wanted.items())]
    return {(load(e.base, head_dim=e.head_dim, mask=e.mask, **tuned.types_of(e.dtype)).attention, e.schedule) for e in entries}


@pytest.mark.parametrize("wanted", [{}, {"head_dim": 64}, {"mask": "causal"}, {"head_dim": 128, "mask": "full"}])
def test_entries_of_the_tuned_table_are_its_kernels(wanted: dict[str, Any]) -> None:
    items = needed.entries([f"{n}={v}" for n, v in wanted.items()], causal=False)
    assert {(i.attention, i.schedule) for i in items} == tuned_kernels(**wanted)
    assert len(items) == len(tuned_kernels(**wanted)) == len({i.name for i in items}), "each kernel once"


def test_settings_change_every_entry() -> None:
    (item, *_) = items = needed.entries(["stages=1", "out_dtype=fp16", "head_dim=256"], causal=True)
    assert all(i.schedule.stages == 1 and i.attention.out_dtype == "fp16" and i.attention.mask == "causal" for i in items)
    assert not item.own_schedule


@pytest.mark.parametrize("precision, of", [("e4m3", "e4m3"), ("int8", "e4m3"), ("int8_qk", "int8_qk")])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_precision_takes_the_entries_of_its_type(precision: str, of: str, dtype: str) -> None:
    """As `fagen.attention` does: rotated, a scale a head, unless other settings say otherwise."""
    items = needed.entries([f"precision={precision}", f"dtype={dtype}"], causal=False)
    assert {(i.attention.head_dim, i.attention.mask) for i in items} == {(d, m) for d in (64, 128, 256) for m in ("full", "causal")}
    assert {i.attention.dtype for i in items} == {i.attention.output_dtype for i in items} == {dtype}
    plain = {i.schedule.replace(precision=None, hadamard=False, scale_granularity="head") for i in items}
    assert plain == {s.replace(scale_granularity="head") for _, s in tuned_kernels(dtype=of)}
    assert {(i.schedule.precision, i.schedule.hadamard, i.schedule.scale_granularity) for i in items} == {(precision, True, "head")}
    (one,) = needed.needed(["tuned"], [f"precision={precision}", f"dtype={dtype}"], False, None, ["2,16,16,4096,4096"], False)
    choice = tuned.choose_quantised(Attention(head_dim=128, dtype=dtype), one.problems[0], precision=precision)
    assert one.item.schedule == choice.schedule and one.item.attention == Attention(head_dim=128, dtype=dtype)
    blocks = needed.entries([f"precision={precision}", "scale_granularity=block"], causal=True)
    assert {(i.schedule.hadamard, i.schedule.scale_granularity) for i in blocks} == {(True, "block")}


@pytest.mark.parametrize(
    "types",
    [["dtype=bf16"], ["dtype=e4m3"], ["dtype=int8"], ["dtype=int8", "v_dtype=bf16"], ["precision=e4m3"], ["precision=int8_qk"]],
    ids=" ".join,
)
def test_what_a_tuned_schedule_is_said_to_be_can_be_built_by_hand(types: list[str]) -> None:
    """`explain tuned` names it by its differences from the file's schedule, with that file's tiles for these types."""
    for kernel in needed.needed(["tuned"], types, None, "paper", (), False):
        item = kernel.item
        name, differences = re.fullmatch(rf"(\w+)(?: with (.*))?, {item.schedule.id}: .*", kernel.about).groups()  # type: ignore[union-attr]
        settings = [*types, f"head_dim={item.attention.head_dim}", f"mask={item.attention.mask}"]
        (base,) = select([name], settings)
        said = {"precision": item.schedule.precision} if item.schedule.precision else {}
        said |= {n: new for n, (_, new) in base.schedule.diff(item.schedule).items()}
        assert (differences or "") == ", ".join(f"{n}={new}" for n, new in said.items())


def test_an_entry_that_is_never_chosen_is_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (table,) = tuned.builtin_tables()
    old, *others = table.entries
    changed = dataclasses.replace(table, entries=(dataclasses.replace(old, schedule_id="00000000"), *others))
    monkeypatch.setattr(tuned, "builtin_tables", lambda: (changed,))
    wanted = {e.schedule.id for e in others if (e.head_dim, e.mask) == (old.head_dim, old.mask)}
    assert {i.schedule.id for i in needed.entries([f"head_dim={old.head_dim}", f"mask={old.mask}"], False)} == wanted
    assert f"{old.label} is left out: its schedule is {old.schedule.id} now" in capsys.readouterr().err


def test_check_tuned(fagen: Any) -> None:
    options = ("--device", "cpu", "--shape", "1,2,1,70,130", "--set", "head_dim=64", "--json")
    cases = fagen("check", "tuned", *options).json["cases"]
    assert len(cases) == len(tuned_kernels(head_dim=64)) == len({c["kernel"] for c in cases})
    both = [c["kernel"] for c in fagen("check", "tuned", "fa2", *options).json["cases"]]
    assert both == [*(c["kernel"] for c in cases), "fa2.hd64-bf16-full"], "in the order of the command line"


def test_check_tuned_on_a_grid_has_what_bench_needs(fagen: Any) -> None:
    options = ("--device", "cpu", "--shape", "1,1,1,65,65", "--set", "head_dim=128", "--set", "dtype=fp16", "--json")
    checked = {c["kernel"] for c in fagen("check", "tuned", "--grid", "paper", *options).json["cases"]}
    bench = needed.distinct(needed.needed(["tuned"], ["head_dim=128", "dtype=fp16"], None, "paper", (), False))
    assert checked == {i.name for i in bench} and len(checked) >= 2


def test_explain_tuned_says_which_and_why(fagen: Any) -> None:
    options = ("--shape", "1,32,32,16384,16384", "--causal", "--set", "head_dim=64", "--no-compile")
    choice = tuned.choose(Attention(head_dim=64, mask="causal"), Problem(1, 16384, 16384, 32, 32))
    answer = fagen("explain", "tuned", *options, "--json").json
    assert answer["schedule"] == choice.schedule.to_dict() and answer["attention"]["mask"] == "causal"
    assert choice.entry is not None and choice.why in answer["about"] and choice.schedule.id in answer["about"]
    assert fagen("explain", "tuned", *options).out.startswith(f"tuned is {answer['about']}\n")
    assert "about" not in fagen("explain", "fa3", "--no-compile", "--json").json


# prove, explain, ls, cache ------------------------------------------------------------------------------------------------


def test_prove(fagen: Any) -> None:
    answer = fagen("prove", "fa3", "fa2", "--causal", "--json")
    assert answer.code == 0
    kernels = answer.json["kernels"]
    assert [k["name"] for k in kernels] == ["fa3.hd128-bf16-causal", "fa2.hd128-bf16-causal"]
    assert all(k["proven"] and k["cases"] > 10 and k["events"] > 100 for k in kernels)
    assert "proven, " in fagen("prove", "fa2").out


def test_prove_mutants_ends_with_the_count(fagen: Any) -> None:
    answer = fagen("prove", "fa2", "--mutants")
    assert answer.code == 0
    last = re.fullmatch(r"(\d+) mutants: (\d+) flagged, (\d+) equivalent", answer.out.splitlines()[-1])
    assert last and int(last[1]) == int(last[2]) + int(last[3]) and int(last[2]) > 20
    assert answer.out.count("  equivalent: ") == int(last[3])


def test_a_mutant_that_slips_through_fails(fagen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fagen.plan import mutants
    from fagen.plan.mutants import Mutant, MutantReport

    def lenient(kernel: Any, *_: Any) -> MutantReport:
        return MutantReport(3, 2, (), (Mutant("without the wait", kernel, "drop"),))

    monkeypatch.setattr(mutants, "run_mutants", lenient)
    answer = fagen("prove", "fa2", "--mutants")
    assert answer.code == 1 and "NOT NOTICED: without the wait" in answer.out


def test_an_unproven_kernel_fails_with_its_interleaving(fagen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fagen.plan import proof
    from fagen.plan.proof import Failure, ProofResult

    failure = Failure("deadlock", "nobody can go on", "batch 1", ("consumer.qk", "producer.k"))
    monkeypatch.setattr(proof, "prove", lambda *_: ProofResult(False, 10, 1, (failure,)))
    answer = fagen("prove", "fa3")
    assert answer.code == 1
    assert "NOT proven" in answer.out and "[deadlock] nobody can go on (batch 1): consumer.qk → producer.k" in answer.out


def test_explain(fagen: Any) -> None:
    answer = fagen("explain", "fa3", "--no-compile", "--json")
    assert answer.code == 0 and {"loop_nest", "shared_memory", "registers"} <= set(answer.json)
    text = fagen("explain", "fa3", "--no-compile").out
    assert all(line in text for line in answer.json["loop_nest"])
    for word in ("Loop nest", "Shared memory", "Registers a thread", "k_full", "consumer"):
        assert word in text
    compiled = fagen("explain", "fa2", "--set", "head_dim=64", "--json").json["registers"]
    assert compiled[0]["compiled"] > 100


def test_ls_tells_the_state_of_evidence(fagen: Any, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = {"shape": [1, 1, 1, 1, 1], "passed": True}
    own = load("fa3")
    code = emit(plan(*own)).code_sha256
    stale = {"hd64-fp16-full": {"code_sha256": "old", "cases": [case] * 60}}
    (here / "generated").mkdir()
    record = {"evidence": {"code_sha256": code, "gpu": "NVIDIA H200", "cases": [case] * 60}, "variants": stale}
    (here / "generated" / "fa3.json").write_text(json.dumps(record))
    answer = fagen("ls", "--json")
    rows = {r["name"]: r for r in answer.json}
    assert answer.code == 0 and list(rows) == [*builtin_names(), *chain_names()]
    row = rows["fa3"]
    assert row["plan"] == plan(*own).id and row["tile_kv"] == own.schedule.tile_kv and row["gpu"] == "NVIDIA H200"
    assert row["evidence"] == "fresh" and row["variants"]["hd64-fp16-full"] == "stale"
    assert sorted(set(row["variants"].values())) == ["none", "stale"] and len(row["variants"]) == 11
    text = fagen("ls").out
    assert "fa3" in text and "1 stale, 10 none" in text
    monkeypatch.setenv("FAGEN_REQUIRE_EVIDENCE", "1")
    answer = fagen("ls")
    assert answer.code == 1 and "fa2 (own attention none, 11 variants none)" in answer.err
    assert "fa3 (10 variants none, 1 variants stale)" in answer.err and "chain/" not in answer.err


def test_ls_requires_nothing_more_once_all_is_fresh(fagen: Any, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = {"shape": [1, 1, 1, 1, 1], "passed": True}
    (here / "generated").mkdir()
    names = [n for n in builtin_names() if not set(ls.survey(n, here)["variants"].values()) & {"illegal"}]
    monkeypatch.setattr(ls, "builtin_names", lambda: names)
    for name in names:
        record: dict[str, Any] = {"variants": {}}
        for item in select([name], variants=True):
            entry = {"code_sha256": emit(plan(item.attention, item.schedule)).code_sha256, "cases": [case] * 60}
            if item.variant is None:
                record["evidence"] = entry
            else:
                record["variants"][item.variant] = entry
        (here / "generated" / f"{name}.json").write_text(json.dumps(record))
    monkeypatch.setenv("FAGEN_REQUIRE_EVIDENCE", "1")
    assert fagen("ls").code == 0


def test_ls_reads_the_evidence_of_a_step_beside_that_of_the_others(fagen: Any, here: Path) -> None:
    name = "chain/fa2_to_fa3_2_producer"
    entry = {"code_sha256": emit(plan(*load(name))).code_sha256, "cases": [{"shape": [1] * 5, "passed": True}] * 60}
    (here / "generated").mkdir()
    (here / "generated" / "fa2_to_fa3_2_producer.json").write_text(json.dumps({"evidence": entry}))
    rows = {r["name"]: r["evidence"] for r in fagen("ls", "--json").json}
    assert {n for n, state in rows.items() if state == "fresh"} == {name}


def test_cache_commands(fagen: Any, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(here / "cache"))
    assert fagen("cache", "ls", "--json").json["entries"] == []
    assert fagen("build", "fa2", "-o", "out", "--set", "head_dim=64").code == 0
    (entry,) = fagen("cache", "ls", "--json").json["entries"]
    assert entry["name"] == "fa2.hd64-bf16-full" and entry["bytes"] > 10000 and entry["arch"] == "sm_90"
    assert "fa2.hd64-bf16-full" in fagen("cache", "ls").out
    assert fagen("cache", "prune", "--json").json["removed"] == []
    assert "removed 1 kernel," in fagen("cache", "prune", "--max-bytes", "100").out
    assert fagen("build", "fa2", "-o", "out", "--set", "head_dim=64").code == 0
    assert len(fagen("cache", "clear", "--json").json["removed"]) == 1
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(here / "out" / "fa2.hd64-bf16-full.cu"))
    answer = fagen("cache", "ls")
    assert answer.code == 2 and "FAGEN_CACHE_DIR" in answer.err


# repro --------------------------------------------------------------------------------------------------------------------


def test_repro_reads_the_case_of_a_bundle(fagen: Any, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU is played; what counts is that exactly the bundle's kernel and case are run."""
    from dataclasses import asdict

    from fagen import check, guard
    from fagen.check import CaseResult, GpuRun
    from fagen.oracle import CheckProblem, Verdict

    assert fagen("build", "fa2", "-o", "out", "--set", "head_dim=64").code == 0
    built = load_built("out", "fa2.hd64-bf16-full")
    problem = CheckProblem(2, 5, 7, 4, 2, "sink", "transposed")
    case = {"problem": asdict(problem), "seed": 12, "repeat": 3, "jitter": False}
    folder = guard.write_bundle(built, {"case": case}, None, here / "repro")
    seen: list[Any] = []
    verdict = Verdict(False, 1.0, 0.5, 2.0, "out is wrong")

    def play(items: Any, builts: Any, **options: Any) -> GpuRun:
        seen.append((items, builts, options))
        return GpuRun((CaseResult(items[0].name, items[0].problems[0], "full", options["seed"], verdict),), "H200", "", {})

    monkeypatch.setattr(check, "check_gpu", play)
    monkeypatch.setattr(check, "first_device", lambda: 0)
    answer = fagen("repro", str(folder))
    assert answer.code == 1 and "fa2.hd64-bf16-full: fails again: out is wrong" in answer.out
    items, builts, options = seen[0]
    assert items[0].problems == (problem,) and builts[0].cubin == built.cubin
    assert (options["seed"], options["repeat"], options["jitter"], options["bundles"]) == (12, 3, False, None)
    verdict = Verdict(True, 0.1, 0.5, 0.2)
    answer = fagen("repro", str(folder), "--json")
    assert answer.code == 0 and answer.json["passed"] and answer.json["reason"] == ""
    (folder / "bundle.json").write_text(json.dumps({"name": built.source.name, "case": {"problem": {"batch": 1}}}))
    assert fagen("repro", str(folder)).code == 2


def test_the_schedule_value_is_what_the_file_says() -> None:
    assert isinstance(load("fa3").schedule, Schedule)
