"""`explain --html`: one self-contained page about a kernel. HTML and SVG as text; nothing is loaded from elsewhere, no script runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Any

from ..emit import Source, emit
from ..errors import InputError
from ..library import resource_dir
from ..plan import Plan
from ..plan import steps as st
from ..plan.kernel import KernelPlan
from ..plan.text import SILENT, heading
from ..value import Value
from . import pictures
from .explain import us
from .knob_lines import knob_lines, step_lines
from .machine import H200, Device
from .shares import CALLED, NEAR

Answer = dict[str, Any]

STEP_CLASS = {
    kind: colour
    for colour, kinds in {
        "copy": "TmaLoad CpAsync Copy LoadFrag LoadAcc LoadRow TransposeV StoreOut StoreRow StoreScores StoreAcc StoreStats StoreFrag",
        "matrix": "Mma MmaWait AddParts",
        "softmax": "OnlineSoftmax StaleSoftmax IntToFloat Mask Pack Rescale RowPass MergeStats SumRow MulRow Reciprocal LogSumExp AddSums",
        "sync": "Wait Arrive Sync NArrive CtaSync ProxyFence CpWait CpCommit",
        "control": "Loop Forever If Vote Elected Break",
    }.items()
    for kind in kinds.split()
}
"""Kind of step → its colour in the loop nest; others are plain."""


def write_page(path: Path, name: str, about: str, plan: Plan, answer: Answer, device: Device = H200) -> None:
    """Write `page` to a file; InputError if that cannot be done."""
    try:
        path.write_text(page(name, about, plan, answer, device), encoding="utf-8")
    except OSError as e:
        raise InputError("--html", f"{path} cannot be written: {e.strerror or e}") from e


def page(name: str, about: str, plan: Plan, answer: Answer, device: Device = H200) -> str:
    """The page of a plan. `answer`: what `explain` says of it, with or without a problem, with or without a measured time."""
    source = emit(plan, name)
    knobs = knob_lines(plan, source)
    several = len(plan.kernels) > 1
    sections = [
        _section("Two values", _values(plan)),
        *([_section("What binds", _binding(answer, device))] if "binds" in answer else []),
        _section(
            "Shared memory",
            "".join(_titled(f"Kernel {k.name}", pictures.memory_map(answer, k.name), several) for k in plan.kernels),
        ),
        _section(
            "Registers",
            pictures.register_map(answer)
            + _note(
                "Tiles that live in registers; the line is the limit a thread has, the dashed one what the compiler used. Indices, sums and addresses take the rest."
            ),
        ),
        _section("Barriers", "".join(_titled(f"Kernel {k.name}", _barriers(k), several) for k in plan.kernels)),
        _section("Loop nest", _nests(plan, source, knobs)),
        _section("Questions", _questions(answer)),
        _section("Code", _code(source, knobs)),
    ]
    style = (Path(resource_dir("templates")) / "page" / "style.css").read_text(encoding="utf-8")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(name)}: fagen explain</title><style>{style}</style>'
    links = "".join(f'<a href="#{_anchor(t)}">{t}</a>' for t in _titles(sections))
    intro = f"<header><h1>{escape(name)}</h1><p>{escape(plan.attention.label)} · plan {plan.id}{f' · {escape(about)}' if about else ''}</p><nav>{links}</nav></header>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{intro}\n<main>{"".join(sections)}</main></body></html>\n'


# parts of the page --------------------------------------------------------------------------------------------------------


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _section(title: str, inside: str) -> str:
    return f'<section id="{_anchor(title)}"><h2>{title}</h2>{inside}</section>\n'


def _titles(sections: Iterable[str]) -> Iterator[str]:
    for text in sections:
        yield text.split("<h2>", 1)[1].split("</h2>", 1)[0]


def _titled(title: str, inside: str, wanted: bool) -> str:
    return f"<h3>{escape(title)}</h3>{inside}" if wanted else inside


def _note(words: str) -> str:
    return f'<p class="note">{escape(words)}</p>'


def _table(head: Iterable[str], rows: Iterable[Iterable[str]], class_: str = "") -> str:
    """Cells are markup; those that are numbers stand to the right."""
    top = "".join(f"<th>{escape(h)}</th>" for h in head)
    body = "".join("<tr>" + "".join(_cell(c) for c in row) + "</tr>" for row in rows)
    return f'<table class="{class_}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'


def _cell(inside: str) -> str:
    number = inside[:1].isdigit() or inside[:1] == "−"
    return f'<td class="number">{inside}</td>' if number else f"<td>{inside}</td>"


# the two values -----------------------------------------------------------------------------------------------------------


def _values(plan: Plan) -> str:
    return f'<div class="pair">{_value("Attention", "what is computed", plan.attention)}{_value("Schedule", "how", plan.schedule)}</div>'


def _value(title: str, about: str, value: Value) -> str:
    """Fields that are set; those at their default fold away."""
    set_: list[str] = []
    rest: list[str] = []
    for f in dataclasses.fields(value):  # type: ignore[arg-type]
        now = getattr(value, f.name)
        given = f.default is dataclasses.MISSING or now != f.default
        (set_ if given else rest).append(f'<tr><td class="knob">{f.name}</td><td>{escape(_shown(now))}</td></tr>')
    defaults = f"<details><summary>{len(rest)} at their default</summary><table>{''.join(rest)}</table></details>"
    return f'<div><h3>{title} <span class="note">{about}</span></h3><table class="set">{"".join(set_)}</table>{defaults}</div>'


def _shown(x: Any) -> str:
    return ", ".join(map(str, x)) if isinstance(x, tuple) else str(x)


# what binds ---------------------------------------------------------------------------------------------------------------


def _binding(answer: Answer, device: Device) -> str:
    p, found = answer["problem"], answer.get("measured")
    sizes = f"batch {p['batch']}, {p['hq']} query heads, {p['hkv']} KV heads, {p['sq']:,} × {p['sk']:,}"
    parts = [
        f'<p class="lead">{escape(answer["sentence"])}</p>',
        _note(
            f"{sizes}, on {device.name}: {device.sms} SMs at {device.clock_mhz:.0f} MHz. Each bar is what that resource alone would take."
        ),
        pictures.bounds(answer),
        _times(answer),
        "<h3>Roofline</h3>",
        pictures.roofline(answer, device),
        _note(
            "Roofs are those of this kernel's own mix of instructions: how many exponentials go with its products, which unit multiplies. Hollow: the bound."
        ),
    ]
    if found and found["shares"]:
        most = CALLED[found["most"]]
        verdict = "as the model says" if found["agrees"] else "against what the model says"
        parts += [
            "<h3>What each part takes</h3>",
            pictures.savings(answer),
            _note(
                f"The kernel with that part removed, timed in turn with the whole one. Most is saved without {most}, {verdict}; in colour: what takes most from {' and '.join(found['binding'])}. Parts that run side by side hide behind one another, so these are no shares that add up."
            ),
        ]
    return "".join(parts)


def _times(answer: Answer) -> str:
    """Predicted beside measured."""
    found = answer.get("measured")
    rows = [
        [r + (" <b>binds</b>" if r == answer["binds"] else ""), us(t), _part(t, answer, found)]
        for r, t in answer["times_us"].items()
    ]
    rows.append(["<b>bound</b>", us(answer["bound_us"]), _part(answer["bound_us"], answer, found)])
    if found:
        ms = found["ms"]
        spread = f" ({us(1e3 * ms['low'])} to {us(1e3 * ms['high'])})" if ms["confidence"] else ""
        rows.append(
            [
                f"<b>measured</b> <span class='note'>{escape(found['gpu'])}, {escape(found['source'])}</span>",
                us(1e3 * ms["median"]) + spread,
                "100 %",
            ]
        )
    return _table(("", "time", "of the measured time" if found else f"of the bound (binds from {100 * NEAR:.0f} %)"), rows)


def _part(t: float, answer: Answer, found: Answer | None) -> str:
    whole = 1e3 * found["ms"]["median"] if found else answer["bound_us"]
    return f"{100 * t / whole:.0f} %"


# barriers -----------------------------------------------------------------------------------------------------------------


def _barriers(kernel: KernelPlan) -> str:
    rows = [
        [f"<code>{b.name}</code>", str(b.stages), str(b.arrivals), f"{b.tx_bytes:,}" if b.tx_bytes else "", _who(kernel, b.name, True), _who(kernel, b.name, False)]
        for b in kernel.mbars
    ]  # fmt: skip
    parts = [_table(("mbarrier", "slots", "arrivals a phase", "bytes a phase", "who arrives", "who waits"), rows)] if rows else []
    named = [
        [
            f"<code>{b.name}</code>",
            f"{b.first_id} … {b.first_id + b.count - 1}",
            str(b.threads),
            _who(kernel, b.name, True),
            _who(kernel, b.name, False),
        ]
        for b in kernel.nbars
    ]
    if named:
        parts.append(_table(("named barrier", "ids", "threads each", "who arrives", "who waits"), named))
    syncs = sum(isinstance(s, st.CtaSync) for r in kernel.roles for s in st.walk(r.body))
    if syncs:
        parts.append(_note(f"{syncs} places where the whole CTA meets."))
    return "".join(parts) or _note("None.")


def _who(kernel: KernelPlan, bar: str, arrives: bool) -> str:
    kinds = (st.Arrive, st.NArrive, st.TmaLoad) if arrives else (st.Wait, st.Sync)
    found = (
        r.name
        for r in kernel.roles
        for s in st.walk(r.body)
        if isinstance(s, kinds) and bar in (getattr(s, "bar", ""), getattr(s, "full", ""))
    )
    return ", ".join(dict.fromkeys(found))


# loop nest ----------------------------------------------------------------------------------------------------------------


def _nests(plan: Plan, source: Source, knobs: dict[int, tuple[str, ...]]) -> str:
    where = step_lines(plan, source)
    legend = "".join(
        f'<span class="step {c}">{n}</span>'
        for c, n in (
            ("copy", "moves data"),
            ("matrix", "product"),
            ("softmax", "softmax, registers"),
            ("sync", "synchronises"),
            ("control", "control"),
        )
    )
    out = [f'<p class="legend">{legend}</p>']
    for kernel in plan.kernels:
        roles = []
        for role in kernel.roles:
            size = "one thread" if role.elect else f"{role.count} × {role.warps * 32} threads"
            limit = f", {role.registers} registers" if role.registers else ""
            roles.append(
                f'<div class="role"><h4>{escape(role.name)} <span class="note">{size}{limit}</span></h4>{_nest(kernel.name, role.body, where, knobs)}</div>'
            )
        out.append(_titled(f"Kernel {kernel.name}", f'<div class="roles">{"".join(roles)}</div>', len(plan.kernels) > 1))
    return "".join(out) + _note(
        "Every step leads to its line of code. Behind it: the knobs of which another value would change that line."
    )


def _nest(kernel: str, body: st.Body, where: dict[tuple[str, str], int], knobs: dict[int, tuple[str, ...]]) -> str:
    items = []
    for step in body:
        if step.kind in SILENT:
            continue
        line = where.get((kernel, step.id))
        words = escape(heading(step))
        label = (
            f'<a href="#L{line}" title="{escape(step.id)}">{words}</a>'
            if line
            else f'<span title="{escape(step.id)}">{words}</span>'
        )
        chips = _chips(knobs.get(line, ()) if line else ())
        inner = ""
        for name, nested in st.bodies(step):
            if any(s.kind not in SILENT for s in nested):
                inner += '<li><span class="step control">else</span></li>' if name == "orelse" else ""
                inner += _nest(kernel, nested, where, knobs)
        items.append(f'<li><span class="step {STEP_CLASS.get(step.kind, "")}">{label}</span>{chips}{inner}</li>')
    return f"<ul>{''.join(items)}</ul>"


FEW = 3


def _few(knobs: tuple[str, ...]) -> str:
    """The first of many; the others under the pointer."""
    rest = knobs[FEW:]
    more = f'<span class="chip" title="{escape(", ".join(rest))}">+{len(rest)}</span>' if rest else ""
    return _chips(knobs[:FEW]) + more


def _chips(knobs: Iterable[str]) -> str:
    return "".join(f'<span class="chip">{k}</span>' for k in knobs)


# questions and code -------------------------------------------------------------------------------------------------------


def _questions(answer: Answer) -> str:
    items = (
        f"<h3>{escape(q)}</h3><ul class='plain'>{''.join(f'<li>{escape(s)}</li>' for s in said)}</ul>"
        for q, said in answer["answers"].items()
    )
    return "".join(items)


def _code(source: Source, knobs: dict[int, tuple[str, ...]]) -> str:
    """Lines with the knobs behind them, named once for each block of lines that share them."""
    rows: list[str] = []
    before: tuple[str, ...] = ()
    for n, text in enumerate(source.text.splitlines(), 1):
        mine = knobs.get(n, ())
        code, slash, comment = text.partition("//")
        shown = escape(code) + (f'<span class="comment">//{escape(comment)}</span>' if slash else "")
        mark = ' class="has"' if mine else ""
        rows.append(
            f'<tr id="L{n}"{mark}><td class="k">{_few(mine) if mine != before else ""}</td><td class="n">{n}</td><td class="c">{shown}</td></tr>'
        )
        before = mine
    return (
        _note("To the left, at the first line of each block: the knobs of which another legal value would change it.")
        + f'<div class="code"><table>{"".join(rows)}</table></div>'
    )
