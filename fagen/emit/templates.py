"""The Jinja side: environment, and the collection of device functions that a file needs, each printed once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jinja2

from ..library import resource_dir

View = dict[str, Any]
"""Names and finished strings or numbers that a template substitutes."""


@lru_cache(maxsize=1)
def environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(resource_dir("templates")),
        block_start_string="<%",  # {% would clash with the operand lists of inline PTX
        block_end_string="%>",
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


@lru_cache(maxsize=256)
def _module(name: str) -> Any:
    return environment().get_template(f"{name}.jinja").module


def line(template: str, view: Mapping[str, Any]) -> str:
    """What a step prints in its role's body."""
    return str(_module(path(template)).line(view))


def path(template: str) -> str:
    """Of a step's template: in steps/, where its name has no folder."""
    return template if "/" in template else f"steps/{template}"


class Helpers:
    """Device functions in order of first need, dependencies first. A template names what it needs in `needs`."""

    def __init__(self) -> None:
        self._texts: dict[str, None] = {}

    def need(self, template: str, view: View | None = None) -> None:
        module = _module(template)
        for other in getattr(module, "needs", ()):
            self.need(other)
        if hasattr(module, "code"):
            self._texts.setdefault(str(module.code(view or {})).strip() + "\n")

    def texts(self) -> list[str]:
        return list(self._texts)
