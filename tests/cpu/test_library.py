"""`load`: names, paths, tiles of a head_dim, overrides, bad files; and where templates and schedules are found."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fp8_steps import PAPER_FP8

import fagen
from fagen import Attention, InputError, Schedule, ScheduleError
from fagen.library import builtin_names, resource_dir

Write = Callable[..., Path]
ROOT = Path(fagen.__file__).parents[1]
GOOD = """\
from fagen import Attention, Schedule
attention = Attention(head_dim=64)
schedule = Schedule(arch="sm_90", tile_q=64, tile_kv=64, warps=4)
"""


@pytest.fixture
def written(tmp_path: Path) -> Write:
    def write(text: str, name: str = "mine.py") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


# what loads ---------------------------------------------------------------------------------------------------------------


def test_built_in_names_load_and_unpack() -> None:
    assert {"fa2", "fa3"} <= set(builtin_names())
    for name in builtin_names():
        attention, schedule = fagen.load(name)
        assert isinstance(attention, Attention) and isinstance(schedule, Schedule)


def test_a_path_loads_as_text_or_path(written: Write) -> None:
    path = written(GOOD)
    assert fagen.load(path) == fagen.load(str(path)) == (Attention(head_dim=64), fagen.load(path).schedule)


def test_a_built_in_name_wins_over_a_file_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fa2").write_text("raise SystemError\n")
    monkeypatch.chdir(tmp_path)
    assert fagen.load("fa2").schedule.mma == "mma_sync"


def test_an_edited_file_is_read_anew(written: Write) -> None:
    path = written(GOOD)
    assert fagen.load(path).schedule.tile_kv == 64
    written(GOOD.replace("tile_kv=64", "tile_kv=32"))
    assert fagen.load(path).schedule.tile_kv == 32


def test_a_file_may_print_without_disturbing_stdout(written: Write, capsys: pytest.CaptureFixture[str]) -> None:
    fagen.load(written(GOOD + "print('hello')\n"))
    assert capsys.readouterr().out == ""


TILES = {
    ("fa2", 64): {"tile_q": 128, "tile_kv": 128, "warps": 8},
    ("fa2", 256): {"tile_q": 128, "tile_kv": 64, "warps": 8},
    ("fa3", 64): {"tile_q": 192, "tile_kv": 128, "consumers": 3},
    ("fa3", 256): {"tile_q": 128, "tile_kv": 80, "consumers": 2},
}


@pytest.mark.parametrize("name, head_dim", TILES)
def test_head_dim_takes_the_files_tiles(name: str, head_dim: int) -> None:
    attention, schedule = fagen.load(name, head_dim=head_dim)
    assert attention.head_dim == head_dim
    assert {k: getattr(schedule, k) for k in TILES[name, head_dim]} == TILES[name, head_dim]


def test_the_same_head_dim_keeps_the_tiles() -> None:
    assert fagen.load("fa3", head_dim=128) == fagen.load("fa3")


def test_overrides_go_to_either_value_and_win_over_the_tiles() -> None:
    attention, schedule = fagen.load("fa3", head_dim=64, tile_kv=96, mask="causal", stages=(1, 2))
    assert (attention.mask, attention.head_dim) == ("causal", 64)
    assert (schedule.tile_kv, schedule.tile_q, schedule.stages) == (96, 192, (1, 2))


def test_a_head_dim_without_tiles_is_left_to_the_rules() -> None:
    with pytest.raises(ScheduleError, match=r"\[head-dim\] head_dim: 96 .*nearest legal: 64, 128, 256"):
        fagen.plan(*fagen.load("fa3", head_dim=96))


# what does not ------------------------------------------------------------------------------------------------------------

BAD = {
    "syntax": ("attention = (\n", "line 1: "),
    "no attention": ("schedule = 1\n", "must define `attention`, a fagen.Attention; it is missing"),
    "no schedule": (
        "from fagen import Attention\nattention = Attention(head_dim=64)\n",
        "must define `schedule`, a fagen.Schedule; it is missing",
    ),
    "wrong type": ("attention = {'head_dim': 64}\n", "must define `attention`, a fagen.Attention; it is a dict"),
    "raises": ("x = 1\nx / 0\n", "line 2: ZeroDivisionError: division by zero"),
    "raises within": ("def f():\n    raise KeyError('k')\n\nf()\n", "line 4: KeyError: 'k'"),
    "unknown knob": ("from fagen import Attention\nattention = Attention(head_dims=64)\n", "line 2: TypeError: .*head_dims"),
    "replaces an unknown knob": (
        "from fagen import Attention\nattention = Attention(head_dim=64).replace(head_dims=8)\n",
        r"\[unknown-knob\] head_dims: .*nearest legal: head_dim",
    ),
    "imports what is not there": ("import no_such_module\n", "line 1: ModuleNotFoundError: No module named 'no_such_module'"),
    "exits": ("import sys\nsys.exit(3)\n", "line 2: SystemExit: 3"),
    "null byte": ("x = '\0'\n", ".+"),
    "empty": ("", "must define `attention`"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_one_sentence_that_names_it(case: str, written: Write) -> None:
    text, message = BAD[case]
    path = written(text, "bad.py")
    with pytest.raises(InputError, match=message) as e:
        fagen.load(path)
    assert e.value.argument == str(path)
    assert str(e.value).startswith(f"{path}: ") and "\n" not in str(e.value) and "Traceback" not in str(e.value)


def test_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_bytes(b"x = '\xff'\n")
    with pytest.raises(InputError, match=r"bad\.py: cannot be read"):
        fagen.load(tmp_path / "bad.py")


def test_an_unreadable_file(written: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, encoding: str = "") -> str:
        raise PermissionError(13, "Permission denied")

    path = written(GOOD)
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(InputError, match=r"cannot be read: .*Permission denied"):
        fagen.load(path)


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder, not a schedule file"):
        fagen.load(tmp_path)


@pytest.mark.parametrize("name", ["nothing/here.py", "\0"])
def test_a_missing_file_lists_the_names(name: str) -> None:
    with pytest.raises(InputError, match=r"no such schedule file or name.*fa2, fa3"):
        fagen.load(name)


@pytest.mark.parametrize("source", [None, 3, ["fa1"], b"fa1", ""])
def test_what_is_no_name_at_all(source: object) -> None:
    with pytest.raises(InputError, match=r"^source: is (empty|a \w+; expected the name)"):
        fagen.load(source)  # type: ignore[arg-type]


def test_a_name_that_no_file_can_have() -> None:
    with pytest.raises(InputError, match="no such schedule file or name; File name too long"):
        fagen.load("x" * 5000)


def test_a_missing_name_suggests_close_ones() -> None:
    with pytest.raises(InputError, match=r"no such schedule file or name; did you mean .*fa3"):
        fagen.load("fa33")


def test_a_type_of_the_products_takes_the_files_tiles() -> None:
    own = fagen.load(PAPER_FP8).schedule
    assert fagen.load(PAPER_FP8, dtype="int8").schedule == own.replace(tile_kv=192)
    assert fagen.load(PAPER_FP8, dtype="bf16", precision="int8").schedule == own.replace(tile_kv=192, precision="int8")
    assert fagen.load(PAPER_FP8, dtype="int8", tile_kv=128).schedule == own.replace(tile_kv=128)
    assert fagen.load(PAPER_FP8, dtype="int8", head_dim=64).schedule == fagen.load(PAPER_FP8, head_dim=64).schedule
    assert fagen.load(PAPER_FP8, dtype="bf16", precision="e4m3").schedule == own.replace(precision="e4m3")


@pytest.mark.parametrize(
    "text",
    [
        "tiles = 3",
        "tiles = {64: 3}",
        "tiles = {64: {'tile_qq': 3}}",
        "tiles = {'64': {'tile_q': 64}}",
        "tiles = {(64, 'int9'): {'tile_q': 64}}",
        "tiles = {(): {'tile_q': 64}}",
    ],
)
def test_bad_tiles_name_the_file(text: str, written: Write) -> None:
    path = written(GOOD.replace("head_dim=64", "head_dim=128") + f"{text}\n")
    for changes in ({}, {"head_dim": 64}):  # looked up or not
        with pytest.raises(InputError, match="`tiles` must map a head_dim") as e:
            fagen.load(path, **changes)
        assert e.value.argument == str(path)


@pytest.mark.parametrize(
    "wrong, hint", [("tile_kw", "did you mean .*tile_kv"), ("head_dims", "did you mean .*head_dim"), ("q", "fields: ")]
)
def test_an_unknown_override_is_named(wrong: str, hint: str) -> None:
    with pytest.raises(InputError, match=f"{wrong}: neither Attention nor Schedule has this field; {hint}"):
        fagen.load("fa3", **{wrong: 1})


# where things are ---------------------------------------------------------------------------------------------------------

EMIT = """
import fagen
from fagen.emit import emit
from fagen.library import resource_dir
attention, schedule = fagen.load("fa2", head_dim=64)
print(fagen.__file__, resource_dir("templates"), resource_dir("schedules"), emit(fagen.plan(attention, schedule)).code_sha256)
"""


def emitted(site: Path, cwd: Path) -> list[str]:
    """The package's file, the two folders and a hash of emitted code, as the installation in `site` has them."""
    env = os.environ | {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run([sys.executable, "-c", EMIT], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def installed(site: Path, *, resources: tuple[Path, ...]) -> None:
    """The package in `site`, and copies of templates and schedules in each folder of `resources`."""
    without_caches = shutil.ignore_patterns("__pycache__")
    inside = shutil.ignore_patterns("__pycache__", "templates", "schedules")
    shutil.copytree(ROOT / "fagen", site / "fagen", ignore=inside)
    for place in resources:
        for name in ("templates", "schedules"):
            shutil.copytree(ROOT / name, place / name, ignore=without_caches)


def test_a_wheel_holds_its_folders_inside_the_package(tmp_path: Path) -> None:
    site = tmp_path / "site"
    installed(site, resources=(site / "fagen",))
    (site / "templates").mkdir()  # of another package: not ours
    file, templates, schedules, code = emitted(site, tmp_path)
    assert Path(file).parent == site / "fagen"
    assert (Path(templates), Path(schedules)) == (site / "fagen" / "templates", site / "fagen" / "schedules")
    assert code == emitted(ROOT, tmp_path)[3]


def test_a_checkout_holds_them_beside_it_and_never_reads_a_stale_copy(tmp_path: Path) -> None:
    site = tmp_path / "checkout"
    installed(site, resources=(site, site / "fagen"))
    (site / "pyproject.toml").write_text("")
    (site / "fagen" / "schedules" / "fa2.py").write_text("stale\n")
    shutil.rmtree(site / "fagen" / "templates" / "steps")
    _, templates, schedules, code = emitted(site, tmp_path)
    assert (Path(templates), Path(schedules)) == (site / "templates", site / "schedules")
    assert code == emitted(ROOT, tmp_path)[3]


def test_this_checkout_reads_its_own_folders() -> None:
    assert resource_dir("templates") == ROOT / "templates"
    assert resource_dir("schedules") == ROOT / "schedules"


def test_a_missing_folder_is_said() -> None:
    with pytest.raises(fagen.FagenError, match="the folder 'no_such_folder' is missing from the installation"):
        resource_dir("no_such_folder")


def test_the_wheel_is_told_to_take_them_in() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    table = text.split("[tool.hatch.build.targets.wheel.force-include]")[1].split("[")[0]
    assert 'templates = "fagen/templates"' in table and 'schedules = "fagen/schedules"' in table
