"""The pages say what is: their code runs, their commands exist, the names and files they mention are there."""

from __future__ import annotations

import ast
import difflib
import functools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest

import fagen
from fagen.cli import COMMANDS, cli, run
from fagen.cli.common import parse_settings
from fagen.emit import emit
from fagen.plan.rules import CHOICES, NOT_YET, NOT_YET_SET

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/architecture.md",
    "docs/guide.md",
    "docs/schedule.md",
    "docs/trace.md",
    "docs/tuning.md",
    "benchmarks/README.md",
)
SLOW = ("--variants",)
NEEDS_GPU = ("--device gpu", "--source", "--jitter", "--debug", "fagen bench", "fagen trace", "fagen repro", "--evidence")


class Block(NamedTuple):
    """A fenced block: the comment `<!-- … -->` right above it ("" if none), its language and its text without indentation."""

    page: str
    mark: str
    language: str
    text: str


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name: str) -> list[Block]:
    fence = re.compile(r"^( *)(?:<!-- ([^\n]*) -->\n\1)?```(\w+)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
    found = []
    for m in fence.finditer(page(name)):
        lines = [line.removeprefix(m[1]) for line in m[4].splitlines()]
        found.append(Block(name, m[2] or "", m[3], "\n".join(lines) + "\n"))
    return found


def marked(mark: str) -> str:
    """The one-line block of README.md under that comment."""
    (text,) = (b.text.strip() for b in blocks("README.md") if b.mark == mark)
    assert "\n" not in text
    return text


def commands() -> Iterator[tuple[str, str]]:
    """(page, command line) of every fagen command in the pages, in blocks and in the prose."""
    for name in PAGES:
        for b in blocks(name):
            if b.language in ("sh", "console"):
                for line in b.text.splitlines():
                    yield from (
                        (name, part.strip()) for part in line.removeprefix("$ ").split("&&") if part.strip().startswith("fagen ")
                    )
        for m in re.finditer(r"`(fagen [^`\n]+)`", page(name)):
            yield name, m[1]
        for line in page(name).splitlines():
            if line.startswith("    fagen "):
                yield name, line.strip()


# ---------------------------------------------------------------------------------------------------------------- the README runs


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("readme")


def test_python_and_commands_of_the_readme_run(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the order of the page, in one namespace; a block that begins with `# NAME.py` is also written to that file. Commands of `sh`
    blocks run unless they need a GPU or a dozen compilations; those of `console` blocks must print what the page shows."""
    monkeypatch.chdir(workplace)
    namespace: dict[str, object] = {}
    ran = 0
    for b in blocks("README.md"):
        if b.mark in ("main command", "test command"):
            continue
        if b.language == "python":
            code = compile(b.text, "README.md", "exec")
            if b.mark == "needs a GPU":
                continue
            if name := re.match(r"# (\w+\.py)\n", b.text):
                (workplace / name[1]).write_text(b.text, encoding="utf-8")
            exec(code, namespace)
        elif b.language == "sh":
            for line in b.text.splitlines():
                if not any(word in line for word in (*NEEDS_GPU, *SLOW)):
                    assert run(shlex.split(line, comments=True)[1:]) == 0, line + "\n" + capsys.readouterr().err
                    ran += 1
        elif b.language == "console":
            command, _, shown = b.text.partition("\n")
            capsys.readouterr()
            assert run(shlex.split(command)[2:]) == 2
            assert capsys.readouterr().err == shown
    assert ran >= 5
    assert (workplace / "out.npz").is_file()


def test_the_schedule_of_the_readme_is_short_and_legal() -> None:
    text = next(b.text for b in blocks("README.md") if b.text.startswith("# my.py"))
    assert len(text.splitlines()) <= 15
    names: dict[str, object] = {}
    exec(text, names)
    attention, schedule = names["attention"], names["schedule"]
    assert isinstance(attention, fagen.Attention) and isinstance(schedule, fagen.Schedule)
    assert fagen.plan(attention, schedule).kernels


def test_blocks_for_a_gpu_use_what_exists() -> None:
    for b in blocks("README.md"):
        if b.language == "python":
            for node in ast.walk(ast.parse(b.text)):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "fagen":
                    assert hasattr(fagen, node.attr), f"fagen.{node.attr}"


# ---------------------------------------------------------------------------------------------------------------- commands


@pytest.mark.parametrize(("name", "line"), sorted(set(commands())))
def test_every_command_exists_with_its_flags(name: str, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    context = click.Context(cli, info_name="fagen")
    command: click.Command | None = cli
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        word = words.pop(0)
        alternatives = word.split("|")  # "cache ls|prune|clear"
        assert all(command.get_command(context, w) for w in alternatives), f"{name}: no command {word!r} in {line!r}"
        command = command.get_command(context, alternatives[0])
    assert command is not None
    flags = {o: p for p in command.get_params(click.Context(command)) for o in (*p.opts, *p.secondary_opts)}
    for i, word in enumerate(words):
        if word.startswith("-"):
            assert word in flags, f"{name}: {line!r} has no option {word}"
            if word == "--set" and "=" in words[i + 1] and "FIELD" not in words[i + 1]:
                parse_settings([words[i + 1]])


def test_the_table_of_commands_is_complete() -> None:
    assert {m[1] for m in re.finditer(r"^\| `fagen (\w+)` \|", page("README.md"), re.MULTILINE)} == set(COMMANDS)


def test_ci_calls_the_test_command_of_the_readme() -> None:
    script = page(".ci/run")
    assert f'test_command="{marked("test command")}"' in script
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_both_commands_set_up_a_machine_on_their_own() -> None:
    for mark in ("main command", "test command"):
        setup = marked(mark).split(" && ")[:3]
        assert setup[:2] == ["python3 -m venv .venv", ". .venv/bin/activate"]
        extra = re.fullmatch(r"pip install -e '\.\[(\w+)\]'", setup[2])
        assert extra and f"\n{extra[1]} = [" in page("pyproject.toml")


def test_exit_codes_and_environment_variables_are_those_of_the_code() -> None:
    from fagen import cli as module

    text = page("README.md")
    for code in (module.INTERNAL, module.INTERRUPTED, module.BROKEN_PIPE):
        assert re.search(rf"\b{code} ", text)
    variable = re.compile(r"\bFAGEN_[A-Z_]+[A-Z]\b")
    used = {v for path in (ROOT / "fagen").rglob("*.py") for v in variable.findall(path.read_text(encoding="utf-8"))}
    assert set(re.findall(r"^\| `(FAGEN_\w+)` \|", text, re.MULTILINE)) == used


# ---------------------------------------------------------------------------------------------------------------- generated lines


@functools.lru_cache(maxsize=16)
def emitted(mark: str) -> tuple[str, ...]:
    """Lines of the kernel that a comment such as `emitted: fa3 stages=3 overlap='within'` names."""
    name, *settings = mark.removeprefix("emitted: ").split()
    attention, schedule = fagen.load(
        name, **{field: ast.literal_eval(value) for field, _, value in (x.partition("=") for x in settings)}
    )
    return tuple(line.strip() for line in emit(fagen.plan(attention, schedule)).text.splitlines())


@pytest.mark.parametrize("name", PAGES)
def test_cuda_on_the_pages_is_what_is_emitted(name: str) -> None:
    for b in blocks(name):
        if b.language == "cuda":
            assert b.mark.startswith("emitted: "), f"{name}: a cuda block that does not say what emits it"
            lines = emitted(b.mark)
            for line in filter(None, map(str.strip, b.text.splitlines())):
                near = difflib.get_close_matches(line, lines, 3, 0.4)
                assert line in lines, f"{name} [{b.mark}] shows\n  {line}\nemitted is\n  " + "\n  ".join(near)
            shown = tuple(map(str.strip, b.text.strip().splitlines()))
            if shown[-1] == "}":  # a whole loop, not lines from here and there
                places = [i for i, line in enumerate(lines) if line == shown[0]]
                assert any(lines[i : i + len(shown)] == shown for i in places), f"{name} [{b.mark}] leaves lines out"


# ---------------------------------------------------------------------------------------------------------------- names and links


@functools.cache
def sources() -> str:
    """All the code there is: what a name on a page may refer to."""
    files = [
        p
        for folder in ("fagen", "templates", "schedules", "tests")
        for p in (ROOT / folder).rglob("*")
        if p.suffix in (".py", ".jinja")
    ]
    return "\n".join(p.read_text(encoding="utf-8") for p in files if p.name != Path(__file__).name)


@pytest.mark.parametrize("name", PAGES)
def test_links_and_paths_lead_somewhere(name: str) -> None:
    text = page(name)
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or ((ROOT / name).parent / target).exists(), f"{name} links to {target}"
    for path in re.findall(r"`((?:fagen|templates|schedules|tests|docs|benchmarks|generated)/[\w./]*)`", text):
        is_output = path.startswith("generated/")  # written by `fagen build`
        assert (ROOT / path).exists() or is_output, f"{name} mentions {path}"


def test_identifiers_of_the_architecture_page_exist() -> None:
    text = re.sub(r"```.*?```", "", page("docs/architecture.md"), flags=re.DOTALL)
    known = set(re.findall(r"\w+", sources())) | {"bind"}
    mentioned = [span for span in re.findall(r"`([^`\n]+)`", text) if re.fullmatch(r"[A-Za-z_][\w.]*(\([^`]*\))?", span)]
    assert len(mentioned) > 60
    for span in mentioned:
        for word in re.findall(r"[A-Za-z_]\w*", span.partition("(")[0]):
            assert word in known or word in ("cp", "async"), (
                f"docs/architecture.md speaks of `{span}`, which the code does not have"
            )


@pytest.mark.parametrize("name", PAGES)
def test_private_names_beside_a_file_are_in_that_file(name: str) -> None:
    """ "`_mma_wait` in `fagen/emit/views.py`" means what it says."""
    for word, path in re.findall(r"`(\w+)`(?:,| and)? (?:in|of) `(fagen/[\w./]+\.py)`", " ".join(page(name).split())):
        assert re.search(rf"\b{word}\b", page(path)), f"{name}: {word} is not in {path}"


# ---------------------------------------------------------------------------------------------------------------- every knob


def knobs() -> dict[str, str]:
    """Field → its paragraph in docs/schedule.md."""
    parts = re.split(r"^### `(\w+)`$", page("docs/schedule.md"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


def test_the_schedule_page_has_every_field_in_order() -> None:
    assert list(knobs()) == [*fagen.Schedule.field_names(), *fagen.Attention.field_names()]


@pytest.mark.parametrize("field", [f for f in knobs() if f in CHOICES])
def test_the_schedule_page_lists_the_values_that_the_rules_take(field: str) -> None:
    """The first words of a field's text: legal values, then "Not yet:" with those that are refused for now."""
    first = " ".join(knobs()[field].split())
    ready, not_yet = re.match(
        r"(.*?\.(?= |$))(?: Required\.| Default None\.)?(?: Not yet: (.*?)\.(?= |$))?", first, re.DOTALL
    ).groups()  # type: ignore[union-attr]

    def values(text: str | None) -> set[str]:
        return set(re.findall(r"[\w]+", (text or "").replace("(default)", "").replace("Required", "").replace("`", "")))

    refused = set(map(str, NOT_YET.get(field, ())))
    assert values(ready) == {str(v) for v in CHOICES[field]} - refused
    assert values(not_yet) == refused


@pytest.mark.parametrize("field", NOT_YET_SET)
def test_the_schedule_page_marks_fields_that_stay_none(field: str) -> None:
    assert knobs()[field].strip().startswith("None (default). Not yet:")


@pytest.mark.parametrize("field", [f for f in knobs() if "(default)" in knobs()[f] or "Default" in knobs()[f]])
def test_defaults_on_the_schedule_page(field: str) -> None:
    kind = fagen.Schedule if field in fagen.Schedule.field_names() else fagen.Attention
    default = str(kind.__dataclass_fields__[field].default)
    text = " ".join(knobs()[field].split())
    assert re.search(rf"(`?{re.escape(default)}`? \(default\)|Default {re.escape(default)}\.)", text), f"{field}: {default}"


def test_the_limits_of_the_readme_are_those_of_the_rules() -> None:
    bullet = re.search(r"\* Not yet, and refused with code `not-yet`:(.*?)\n\* ", page("README.md"), re.DOTALL)
    assert bullet
    said = {tuple(x.split("=")) for x in re.findall(r"`([^`]+)`", bullet[1])}
    bare = {x[0] for x in said if len(x) == 1}
    pairs = {(x[0], ast.literal_eval(x[1])) for x in said if len(x) == 2}
    wanted = {(f, v) for f, values in NOT_YET.items() for v in values}
    assert bare >= set(NOT_YET_SET)
    assert {p for p in wanted if p[0] not in bare} == pairs
    assert bare <= {f for f, _ in wanted} | set(NOT_YET_SET)


# ---------------------------------------------------------------------------------------------------------------- the repository


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:  # no git, or an archive without history: everything but what tools leave behind
        hidden = re.compile(r"(^|/)(\.[\w]+_cache|\.venv|\.hypothesis|\.git|__pycache__|repro)(/|$)")
        return [p for p in ROOT.rglob("*") if p.is_file() and not hidden.search(p.relative_to(ROOT).as_posix())]
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_path_of_somebodys_machine() -> None:
    private = re.compile(r"/(?:" + "work|root|home" + r")/\w")
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # not text
        found = private.search(text)
        assert not found or path == Path(__file__), f"{path.relative_to(ROOT)}: {found[0] if found else ''}"


def test_the_package_can_be_typed_against_and_called_as_a_module() -> None:
    assert (ROOT / "fagen/py.typed").is_file()
    done = subprocess.run([sys.executable, "-m", "fagen", "--version"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"fagen {fagen.__version__}\n")
    assert f'\nversion = "{fagen.__version__}"\n' in page("pyproject.toml")
