"""What the commands share: choosing kernels, writing results, telling progress."""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..attention import Attention
from ..errors import FagenError, InputError, ScheduleError
from ..evidence import variant_id
from ..library import load
from ..schedule import Schedule

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..compile import Built
    from ..plan import Plan

F = TypeVar("F", bound=Callable[..., Any])
Decorator = Callable[[F], F]

WIDTH = 150
"""Of tables that do not go to a terminal."""

HEAD_DIMS, HALF_TYPES, MASKS = (64, 128, 256), ("bf16", "fp16"), ("full", "causal")


class Refused(FagenError):
    """A kernel that was asked for is not legal; the message names it."""


# ---------------------------------------------------------------------------------------------------------------- which kernels


@dataclass(frozen=True)
class Selected:
    """A kernel to work on. `name` names its files; `variant`: its attention as evidence names it, None: the file's own."""

    stem: str
    name: str
    variant: str | None
    attention: Attention
    schedule: Schedule
    own_schedule: bool
    """The schedule is as the file gives it for this head_dim."""


def refuse_given(reason: str, *names: str, but: Collection[str] = ()) -> None:
    """InputError with this reason for the first parameter given on the running command's line that is one of `names` (none: any), and not one
    of `but`. Names as Python has them; an option is refused whatever its value, its default too."""
    context = click.get_current_context()
    for param in context.command.params:
        name = str(param.name)
        given = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if given and (name in names or not names) and name not in but:
            shown = "/".join((*param.opts, *param.secondary_opts)) if isinstance(param, click.Option) else "SCHEDULE"
            raise InputError(shown, reason)


def parse_settings(settings: Sequence[str], causal: bool = False, option: str = "--set") -> dict[str, Any]:
    """`--set knob=value` … as field values; `causal`: the mask as well. `option`: which they stand behind, for messages."""

    changes: dict[str, Any] = {}
    known = Attention.field_names() + Schedule.field_names()
    for text in settings:
        _, equals, value = text.partition("=")
        name = knob_of(text)
        if not equals or not name:
            raise InputError(option, f"{text!r} is not knob=value, such as tile_kv=128")
        if name not in known:
            near = difflib.get_close_matches(name, known)
            hint = f"did you mean {' or '.join(near)}?" if near else f"knobs: {', '.join(known)}"
            raise InputError(option, f"no knob {name!r} in an attention or a schedule; {hint}")
        if name in changes:
            raise InputError(option, f"{name} is given twice: {changes[name]!r} and {value.strip()}")
        changes[name] = field_value(name, value)
    if causal:
        if changes.get("mask", "causal") != "causal":
            raise InputError("--causal", f"contradicts --set mask={changes['mask']}")
        changes["mask"] = "causal"
    return changes


def knob_of(setting: str) -> str:
    """The field that `knob=value` speaks of."""
    return setting.partition("=")[0].strip().replace("-", "_")


def field_value(name: str, text: str) -> Any:
    """A value for a field of the attention or the schedule: "none" is None only where the field knows None (overlap's is a word)."""
    if text.strip().lower() == "none":
        fields = {f.name: str(f.type) for of in (Attention, Schedule) for f in dataclasses.fields(of)}
        return None if "None" in fields[name] else "none"
    return parse_value(text)


def parse_value(text: str) -> Any:
    """A field's value: 128, 0.5, true, false, none, a pair such as 2,3, or else a name."""
    text = text.strip()
    if text.startswith("(") and text.endswith(")"):  # a pair as messages print it
        text = text[1:-1]
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    if "," in text:
        return tuple(parse_value(part) for part in text.split(","))
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def select(sources: Sequence[str], settings: Sequence[str] = (), causal: bool = False, variants: bool = False) -> list[Selected]:
    """The kernels that a command line asks for. With `variants`, all of `variants_of` every schedule that the settings leave open.

    Says on stderr which tiles a changed head_dim took from the file. Raises InputError naming the file, the knob or the clash.
    """
    changes = parse_settings(settings, causal)
    chosen: list[Selected] = []
    for source in sources:
        own = load(source)
        for variant in variants_of(own.attention) if variants else [{}]:
            wanted = {**variant, **changes}
            item = _select(source, own.attention, wanted)
            if variants and item in chosen:
                continue  # a setting made two variants the same
            chosen.append(item)
            if not variants:
                _tell_tiles(item, own.schedule, wanted)
    names = [c.name for c in chosen]
    clash = next((n for n in names if names.count(n) > 1), None)
    if clash:
        raise InputError(clash, "two of the schedules given would write files of this name")
    return chosen


def variants_of(own: Attention) -> list[dict[str, Any]]:
    """The attentions that a schedule is built and checked for: every head_dim and mask, in both 16-bit types; if it is for e4m3, in that
    with outputs of both 16-bit types."""
    field, default = ("dtype", own.dtype) if own.dtype in HALF_TYPES else ("out_dtype", own.output_dtype)
    types = [getattr(own, field) if t == default else t for t in HALF_TYPES]  # an out_dtype of None stays as it is
    return [{"head_dim": d, field: t, "mask": m} for d in HEAD_DIMS for t in types for m in MASKS]


def _select(source: str, own: Attention, changes: dict[str, Any]) -> Selected:
    attention, schedule = load(source, **changes)
    natural = load(source, **({"head_dim": changes["head_dim"]} if "head_dim" in changes else {})).schedule
    stem = Path(source).stem
    variant = None if attention == own else variant_id(attention)
    parts = [stem, *([variant] if variant else []), *([schedule.id] if schedule != natural else [])]
    return Selected(stem, ".".join(parts), variant, attention, schedule, schedule == natural)


def _tell_tiles(item: Selected, before: Schedule, changes: dict[str, Any]) -> None:
    taken = {n: new for n, (_, new) in before.diff(item.schedule).items() if n not in changes}
    if taken:
        fields = ", ".join(f"{n}={v}" for n, v in taken.items())
        note(f"{item.stem} at head_dim {item.attention.head_dim} takes the file's {fields}")


def planned(item: Selected, *, debug: bool = False, trace: bool = False) -> Plan:
    """The proven plan; Refused, naming the kernel, where it is not legal."""
    from ..plan import plan

    with refusing(item):
        return plan(item.attention, item.schedule, debug=debug, trace=trace)


@contextmanager
def refusing(item: Selected) -> Iterator[None]:
    """Turns a ScheduleError into one that names the kernel."""
    try:
        yield
    except ScheduleError as e:
        lines = "\n".join(f"  {v}" for v in e.violations)
        raise Refused(f"{item.stem} ({item.attention.label}) is not legal:\n{lines}") from e


def built_name(item: Selected, debug: bool = False, trace: bool = False) -> str:
    """Name of the kernel's files."""
    return f"{item.name}.debug" if debug else f"{item.name}.trace" if trace else item.name


def built(item: Selected, *, debug: bool = False, trace: bool = False, folder: str | None = None) -> Built:
    """The compiled kernel: from `folder` (as `fagen build` wrote it; no compiler is needed), or by NVRTC through the cache."""
    from ..compile import build, load_built
    from ..emit import emit

    name = built_name(item, debug, trace)
    if folder is None:
        plan = planned(item, debug=debug, trace=trace)
        return build(plan, emit(plan, name))
    ready = load_built(folder, name)
    for mine, its in ((item.attention, ready.plan.attention), (item.schedule, ready.plan.schedule)):
        if mine != its:
            fields = ", ".join(f"{n}={b} (wanted {a})" for n, (a, b) in mine.diff(its).items())
            raise InputError(str(Path(folder) / f"{name}.json"), f"was built for {fields}; build it again")
    for kind, wanted, has in (("debug", debug, ready.plan.debug), ("trace", trace, ready.plan.trace)):
        if has != wanted:
            raise InputError(str(Path(folder) / f"{name}.json"), f"is {'' if has else 'not '}a {kind} build")
    return ready


# ---------------------------------------------------------------------------------------------------------------- options

set_option = click.option(
    "--set", "settings", multiple=True, metavar="KNOB=VALUE", help="Change a field of the attention or the schedule; repeatable."
)
causal_option = click.option("--causal", is_flag=True, help="Short for --set mask=causal.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, and nothing else, on stdout.")
from_option = click.option(
    "--from", "folder", metavar="DIR", help="Take kernels that `fagen build` wrote there; needs no compiler."
)
variants_option = click.option(
    "--variants",
    is_flag=True,
    help="Every head_dim (64, 128, 256), type (bf16, fp16; for e4m3: of out) and mask (full, causal) of the schedule.",
)


def device_option(what: str) -> Decorator[Any]:
    return click.option(
        "--device", type=click.Choice(["gpu", "cpu"]), help=f"Where: {what}. Default: gpu if there is one, else cpu."
    )


def choose_device(asked: str | None) -> str:
    """ "gpu" or "cpu"; says on stderr when it is the simulator for want of a GPU. LaunchError if a GPU was asked for in vain."""
    from ..check import first_device, reason_no_gpu

    if asked == "gpu":
        first_device()
        return "gpu"
    if asked == "cpu":
        return "cpu"
    reason = reason_no_gpu()
    if reason:
        note(f"{reason}; running the simulator on the CPU")
    return "cpu" if reason else "gpu"


# ---------------------------------------------------------------------------------------------------------------- output


def note(text: str) -> None:
    """A line on stderr."""
    print(f"fagen: {text}", file=sys.stderr, flush=True)


def write_json(value: Any) -> None:
    """The result of a command with --json."""
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def write(*parts: RenderableType) -> None:
    """Text and tables on stdout. Text stands as it is, whatever its length; tables fit the terminal, or WIDTH where there is none."""
    from rich.console import Console

    for part in parts:
        if isinstance(part, str):
            print(part)
            continue
        width = None if sys.stdout.isatty() else WIDTH
        Console(width=width, highlight=False, markup=False, emoji=False).print(part)


class Progress:
    """Says on stderr what is being done, at once and then every few seconds: a line that rewrites itself on a terminal."""

    EVERY = 5.0

    def __init__(self, what: str, total: int):
        self._what, self._total, self._done = what, total, 0
        self._live = sys.stderr.isatty()
        self._shown = 0.0
        self._show("")

    def step(self, about: str = "", *, counts: bool = True) -> None:
        """One more is done (unless not `counts`); `about`: what the line should say beside the number."""
        self._done += counts
        if self._live or time.monotonic() - self._shown > self.EVERY:
            self._show(about)

    def close(self) -> None:
        if self._live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _show(self, about: str) -> None:
        self._shown = time.monotonic()
        count = f" {self._done}/{self._total}" if self._total > 1 else ""
        text = f"fagen: {self._what}{count}" + (f"  {about}" if about else "")
        print(f"\r\033[K{text[:110]}" if self._live else f"{text} …", end="" if self._live else "\n", file=sys.stderr, flush=True)
