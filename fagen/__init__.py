"""fagen: a code-generating kernel compiler for attention."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .attention import Attention
from .errors import CompileError, FagenError, HostError, InputError, InternalError, LaunchError, ScheduleError, Violation
from .library import load
from .plan import Plan, plan
from .schedule import Schedule

if TYPE_CHECKING:
    from .api import compile, reference, simulate
    from .attend import attention
    from .launch import Kernel
    from .quantise import quantise, simulate_quantise

__version__ = "0.1.0"

__all__ = [
    "Attention",
    "CompileError",
    "FagenError",
    "HostError",
    "InputError",
    "InternalError",
    "Kernel",
    "LaunchError",
    "Plan",
    "Schedule",
    "ScheduleError",
    "Violation",
    "attention",
    "compile",
    "load",
    "plan",
    "quantise",
    "reference",
    "simulate",
    "simulate_quantise",
]

_LATER = {
    "attention": "attend",
    "compile": "api",
    "reference": "api",
    "simulate": "api",
    "Kernel": "launch",
    "quantise": "quantise",
    "simulate_quantise": "quantise",
}
"""Imported when they are first asked for: they bring the compiler, the templates and NumPy with them."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_LATER[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


class _Package(ModuleType):
    """`fagen.compile`, `fagen.attention` and `fagen.quantise` are the functions. Python would put the modules of those names in their place when somebody
    imports them."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _LATER and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
globals().pop("attention", None)  # the module, put there above: `__getattr__` brings the function
