"""Schedules by name or path: `load`, and where the built-in ones and the templates are."""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import types
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from .attention import Attention
from .errors import FagenError, InputError
from .schedule import Schedule


class Loaded(NamedTuple):
    """What a schedule file says. Unpacks as `attention, schedule`."""

    attention: Attention
    schedule: Schedule


def resource_dir(name: str) -> Path:
    """`templates` or `schedules`: beside the package in a checkout, inside it in a wheel.

    The checkout wins where both exist, so that an editable install never reads a stale copy.
    """
    package = Path(__file__).resolve().parent
    for place in (package.parent / name, package / name):
        if place.is_dir() and (place.parent != package.parent or (package.parent / "pyproject.toml").is_file()):
            return place
    raise FagenError(f"the folder {name!r} is missing from the installation at {package}")


def builtin_names() -> tuple[str, ...]:
    """Names of the schedules that come with fagen."""
    return tuple(sorted(p.stem for p in resource_dir("schedules").glob("*.py")))


def chain_names() -> tuple[str, ...]:
    """Names of the schedules between two generations, "chain/FROM_to_TO_N_IDEA": each changes one idea of the one before it."""
    return tuple(sorted(f"chain/{p.stem}" for p in (resource_dir("schedules") / "chain").glob("*.py")))


def chain(first: str, last: str) -> tuple[str, ...]:
    """The names from one built-in schedule to another, both included, in the order of the steps: chain("fa1", "fa2").

    InputError: no chain leads from `first` to `last`."""
    steps = tuple(n for n in chain_names() if re.match(rf"chain/{re.escape(first)}_to_{re.escape(last)}_\d", n))
    if not steps:
        ends = (re.fullmatch(r"chain/(.+)_to_(.+)_\d+_.+", n) for n in chain_names())
        known = sorted({f"{m[1]} → {m[2]}" for m in ends if m})
        raise InputError(f"{first} → {last}", f"no chain of schedules leads there; known: {', '.join(known)}")
    return (first, *steps, last)


def load(source: str | Path, **changes: Any) -> Loaded:
    """The (attention, schedule) of a built-in name, of a step between two of them (see `chain`) or of a path to a schedule file, with
    fields of either value changed.

    Changing head_dim, or the type of the products, takes the file's `tiles` for them, unless the change names the same fields itself.
    Raises InputError naming the file (missing, a folder, a syntax error, without the two names, raising) or the unknown field.
    """
    path = _path(source)
    names = _run(path)
    attention, schedule = names["attention"], names["schedule"]
    changes = _tiles(path, names, attention, changes) | changes
    mine = {k: v for k, v in changes.items() if k in Attention.field_names()}
    its = {k: v for k, v in changes.items() if k in Schedule.field_names()}
    unknown = [k for k in changes if k not in mine and k not in its]
    if unknown:
        known = Attention.field_names() + Schedule.field_names()
        near = difflib.get_close_matches(unknown[0], known)
        hint = f"; did you mean {' or '.join(near)}?" if near else f"; fields: {', '.join(known)}"
        raise InputError(unknown[0], f"neither Attention nor Schedule has this field{hint}")
    return Loaded(attention.replace(**mine), schedule.replace(**its))


def _tiles(path: Path, names: dict[str, Any], attention: Attention, changes: dict[str, Any]) -> dict[str, Any]:
    """The tiles a schedule file gives for another head_dim, or for a head_dim and the types of the products (`Attention.products`)."""
    tables: Any = names.get("tiles", {})
    if not _are_tiles(tables):
        raise InputError(
            str(path), f"`tiles` must map a head_dim, or (head_dim, products), to fields of Schedule; it is {tables!r}"
        )
    head_dim = changes.get("head_dim", attention.head_dim)
    types = {n: changes[n] for n in ("dtype", "v_dtype") if n in changes}
    products = changes.get("precision") or attention.replace(**types).products
    if (head_dim, products) == (attention.head_dim, attention.products):
        return {}
    other = head_dim != attention.head_dim
    wanted = ((head_dim, products), head_dim) if other else ((head_dim, products),)
    tiles: dict[str, Any] = next((tables[key] for key in wanted if key in tables), {})
    return tiles


def _are_tiles(tables: object) -> bool:
    """Whether all of it is what `tiles` of a schedule file may be, whether looked up or not."""
    from .plan.rules import CHOICES, HEAD_DIMS

    known = (*CHOICES["dtype"], "int8_qk")  # as `Attention.products` has them
    if not isinstance(tables, dict):
        return False
    for key, tiles in tables.items():
        head_dim, *products = key if isinstance(key, tuple) and key else (key,)
        if type(head_dim) is not int or head_dim not in HEAD_DIMS or products not in ([], *([p] for p in known)):
            return False
        if not isinstance(tiles, dict) or not set(tiles) <= set(Schedule.field_names()):
            return False
    return True


def _path(source: str | Path) -> Path:
    if not isinstance(source, (str, os.PathLike)):
        raise InputError(
            "source", f"is a {type(source).__name__}; expected the name of a built-in schedule or the path of a schedule file"
        )
    text = str(source)
    if not text:
        raise InputError("source", f"is empty; built-in schedules: {', '.join(builtin_names())}")
    if isinstance(source, str) and source in (*builtin_names(), *chain_names()):
        return resource_dir("schedules") / f"{source}.py"
    path = Path(source)
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as e:  # such as a name that is too long
        raise InputError(text, f"no such schedule file or name; {e.strerror}") from e
    if is_folder:
        raise InputError(text, "is a folder, not a schedule file")
    if not is_file:
        near = difflib.get_close_matches(text, (*builtin_names(), *chain_names()))
        hint = f"did you mean {' or '.join(near)}?" if near else f"built-in schedules: {', '.join(builtin_names())}"
        if text.startswith("chain") and not near:
            hint = f"steps: {', '.join(chain_names())}"
        if text == "tuned":
            hint = "it stands for the table of tuned schedules in build, check, explain, bench and trace alone"
        raise InputError(text, f"no such schedule file or name; {hint}")
    return path


@lru_cache(maxsize=64)
def _compiled(path: Path, text: str) -> types.CodeType:
    return compile(text, str(path), "exec")


def _run(path: Path) -> dict[str, Any]:
    """Execute a schedule file and check the two names it must define."""
    try:
        code = _compiled(path, path.read_text(encoding="utf-8"))
    except SyntaxError as e:
        raise InputError(str(path), f"line {e.lineno}: {e.msg}") from e
    except (OSError, ValueError) as e:
        raise InputError(str(path), f"cannot be read: {e}") from e
    names: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # a schedule file must not disturb --json
            exec(code, names)
    except FagenError as e:
        raise InputError(str(path), str(e)) from e
    except (Exception, SystemExit) as e:  # the file is the user's: whatever it raises is theirs to see, in one line
        line = e.__traceback__.tb_next.tb_lineno if e.__traceback__ and e.__traceback__.tb_next else "?"
        raise InputError(str(path), f"line {line}: {type(e).__name__}: {e}") from e
    for name, kind in (("attention", Attention), ("schedule", Schedule)):
        if not isinstance(names.get(name), kind):
            got = f"is a {type(names[name]).__name__}" if name in names else "is missing"
            raise InputError(str(path), f"must define `{name}`, a fagen.{kind.__name__}; it {got}")
    return names
