"""A few SVG elements as text. Sizes in user units (pixels at scale 1); colours and fonts come from the page's classes."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


def element(name: str, inside: str = "", **attributes: object) -> str:
    """<name …>inside</name>; `class_` is the attribute class, other underscores are hyphens. `inside` is markup already."""
    text = "".join(f' {k.rstrip("_").replace("_", "-")}="{escape(_number(v))}"' for k, v in attributes.items())
    return f"<{name}{text}>{inside}</{name}>" if inside else f"<{name}{text}/>"


def picture(width: float, height: float, parts: Iterable[str], title: str) -> str:
    """The whole drawing; `title` is what a screen reader says. It shrinks with the page, and is never larger than it is drawn."""
    box = f"0 0 {_number(width)} {_number(height)}"
    inside = element("title", escape(title)) + "".join(parts)
    return element(
        "svg", inside, viewBox=box, role="img", style=f"max-width:{_number(width)}px", xmlns="http://www.w3.org/2000/svg"
    )


def rect(x: float, y: float, width: float, height: float, class_: str, tip: str = "", **more: object) -> str:
    """A box; `tip` shows under the pointer."""
    return element("rect", _tip(tip), x=x, y=y, width=max(width, 0), height=height, class_=class_, **more)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> str:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def circle(x: float, y: float, r: float, class_: str, tip: str = "") -> str:
    return element("circle", _tip(tip), cx=x, cy=y, r=r, class_=class_)


def text(x: float, y: float, words: str, class_: str = "", anchor: str = "start", **more: object) -> str:
    return element("text", escape(words), x=x, y=y, class_=class_, text_anchor=anchor, **more)


def _tip(words: str) -> str:
    return element("title", escape(words)) if words else ""


def _number(v: object) -> str:
    return f"{v:.2f}".rstrip("0").rstrip(".") if isinstance(v, float) else str(v)
