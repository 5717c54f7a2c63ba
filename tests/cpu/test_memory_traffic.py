"""benchmarks/memory_traffic.py where there is no ncu: what is wrong is one line, said before anything runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fagen.cli import run

ROOT = Path(__file__).resolve().parent.parent.parent


def script(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "memory_traffic.py"), *arguments]
    env = {"PATH": str(cwd), "PYTHONPATH": str(ROOT), "HOME": str(cwd)}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["standard", "--shape", "1,1,1,64,64"], 1, "ncu is not on the PATH"),
        (["fa1", "--shape", "1,1"], 2, "--shape: '1,1' is not B,HQ,HKV,SQ,SK"),
        (["fa1", "--shape", "1,3,2,64,64"], 2, "--shape: '1,3,2,64,64': 3 query heads are not a multiple"),
        (["fa1", "--shape", "1,1,1,0,64"], 2, "--shape: '1,1,1,0,64' has no rows of Q"),
        (["fa1", "--shape", "1,1,1,64,0"], 2, "--shape: '1,1,1,64,0' has no keys"),
        (["fa1", "tuned", "--shape", "1,1,1,64,64"], 2, "tuned: no such schedule file or name"),
        (["fa1", "--shape", "1,1,1,64,64", "--output", "none/x.json"], 2, "--output: there is no folder none"),
        (["fa1", "--shape", "1,1,1,64,64", "--from", "none"], 2, "none/fa1.json: cannot be read"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], code: int, message: str, tmp_path: Path) -> None:
    done = script(*arguments, cwd=tmp_path)
    assert done.returncode == code and done.stdout == ""
    assert done.stderr.startswith(f"memory_traffic.py: {message}") and done.stderr.count("\n") == 1


def test_kernels_of_a_folder_are_found_by_their_files_name_and_must_be_the_schedules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = "chain/fa1_to_fa2_4_split_q"
    assert run(["build", step, "-o", str(tmp_path)]) == 0
    shape = ("--shape", "1,1,1,64,64", "--from", str(tmp_path))
    assert "ncu is not on the PATH" in script(step, *shape, cwd=tmp_path).stderr
    (tmp_path / "fa1.json").write_text((tmp_path / "fa1_to_fa2_4_split_q.json").read_text())
    done = script("fa1", *shape, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("memory_traffic.py: ") and "Traceback" not in done.stderr
