"""The exceptions of fagen.

Two families that never mix: what the user can mend (`ScheduleError`, `InputError`, `CompileError`, `LaunchError`, `HostError`, all under
`FagenError`) and what only we can mend (`InternalError`). A fault of ours must never read like the user's mistake.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


class FagenError(Exception):
    """Base of everything the user can act on. The command line prints it in one sentence and exits with `exit_code`."""

    exit_code = 2


@dataclass(frozen=True)
class Violation:
    """One broken rule.

    `code` is stable and short ("smem", "tile-q", "not-yet" …); `field` the knob it speaks of; `message` a sentence with the
    number asked for and the limit; `nearest` the legal values closest to the one given, nearest first.
    """

    code: str
    field: str
    message: str
    nearest: tuple[object, ...] = ()

    def __str__(self) -> str:
        hint = f" (nearest legal: {', '.join(str(v) for v in self.nearest)})" if self.nearest else ""
        return f"[{self.code}] {self.field}: {self.message}{hint}"


class ScheduleError(FagenError):
    """The attention or the schedule is not legal. Carries every violation of the first layer that fails."""

    def __init__(self, violations: Iterable[Violation]):
        self.violations = tuple(violations)
        super().__init__("\n".join(str(v) for v in self.violations))

    @property
    def codes(self) -> tuple[str, ...]:
        return tuple(v.code for v in self.violations)

    def __reduce__(self) -> tuple[type, tuple[tuple[Violation, ...]]]:
        return (ScheduleError, (self.violations,))


class InputError(FagenError):
    """A tensor, file or command-line argument is unusable. `argument` names it."""

    def __init__(self, argument: str, message: str):
        self.argument, self.message = argument, message
        super().__init__(f"{argument}: {message}")

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return (InputError, (self.argument, self.message))


class CompileError(FagenError):
    """NVRTC or ptxas refused the source, or its report breaks a promise (spill, serialised WGMMA, advisory). `log` is whole."""

    exit_code = 1

    def __init__(self, message: str, log: str = ""):
        self.message, self.log = message, log
        super().__init__(message)

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return (CompileError, (self.message, self.log))


class LaunchError(FagenError):
    """The driver refused a call, a kernel trapped, or there is no GPU to run on."""

    exit_code = 1


class HostError(FagenError):
    """A process that works for fagen ended before its work; most often the system killed it for want of memory."""

    exit_code = 1


class InternalError(Exception):
    """A fault of fagen's own: please report it. Not a `FagenError`, so that it is never shown as the user's mistake."""
