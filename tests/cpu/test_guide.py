"""docs/guide.md does what it says: its blocks run in order, in one folder and one namespace, and print what it shows."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import pytest
from test_readme import NEEDS_GPU, ROOT, blocks

from fagen.cli import run

GUIDE = "docs/guide.md"
NO_GPU = ("--device gpu", "fagen bench", "fagen tune", "--measure", "fagen check my.py")
"""What a block marked for a GPU must contain in every line: everything else is run here."""


def shown_in(shown: str, printed: str) -> str | None:
    """The first shown line that is not printed at its place; "…" alone stands for any number of lines, at the end of a line for its rest."""
    lines = [line.rstrip() for line in printed.splitlines()]
    at, free = 0, False
    for want in shown.rstrip("\n").split("\n"):
        if want == "…":
            free = True
            continue
        pattern = re.compile(
            ".*".join(re.escape(part) for part in want.rstrip().split("…")) if _elided(want) else re.escape(want.rstrip())
        )
        there = next((i for i in range(at, len(lines) if free else at + 1) if i < len(lines) and pattern.fullmatch(lines[i])), None)
        if there is None:
            return want
        at, free = there + 1, False
    return None if free or at == len(lines) else f"(end of output, but there is more: {lines[at]})"


def _elided(line: str) -> bool:
    """A line of which something is left out. The … of a program's own text (`q[m * 128 …]`) stands before a bracket."""
    return "…" in re.sub(r"…\]", "", line)


def test_everything_in_the_guide_runs_and_prints_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    namespace: dict[str, object] = {}
    ran, printed = 0, ""
    for b in blocks(GUIDE):
        if b.language == "python":
            if name := re.match(r"# (\w+\.py)\n", b.text):
                (tmp_path / name[1]).write_text(b.text, encoding="utf-8")
            capsys.readouterr()
            exec(compile(b.text, GUIDE, "exec"), namespace)
            printed, ran = capsys.readouterr().out, ran + 1
        elif b.language == "text":
            assert printed == b.text
        elif b.language == "console":
            command, _, shown = b.text.partition("\n")
            capsys.readouterr()
            assert run(shlex.split(command)[2:]) == 0, command + "\n" + capsys.readouterr().err
            printed, ran = capsys.readouterr().out, ran + 1
            missing = shown_in(shown, printed)
            assert missing is None, f"{command}\nshould print\n{missing}\nprints\n{printed}"
        else:
            assert (b.language, b.mark) == ("sh", "needs a GPU")
            for line in b.text.splitlines():
                assert any(word in line for word in (*NO_GPU, *NEEDS_GPU)), f"{line} needs no GPU: let it run"
    assert ran > 15
    assert (tmp_path / "my.html").is_file() and (tmp_path / "built" / "my.cubin").is_file()


def test_the_comparison_with_what_is_shown_can_fail() -> None:
    printed = "a\nb 12 c\nd\n"
    assert shown_in("a\nb 12 c\nd\n", printed) is None
    assert shown_in("…\nb … c\n…\n", printed) is None
    assert shown_in("…\nd\n", printed) is None
    assert shown_in("a\nd\n", printed) == "d"
    assert shown_in("…\nd\n…\na\n…\n", printed) == "a", "in another order"
    assert shown_in("…\nb … x\n…\n", printed) == "b … x"
    assert shown_in("a\n", printed) == "(end of output, but there is more: b 12 c)"
    assert shown_in("q[m …]\n", "q[m 1]\n") == "q[m …]", "a program's own ellipsis is no gap"


def test_every_python_block_that_prints_shows_it() -> None:
    for b, after in itertools.pairwise(blocks(GUIDE)):
        if b.language == "python":
            assert ("print(" in b.text) == (after.language == "text"), b.text
