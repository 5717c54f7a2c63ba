"""What `Attention` and `Schedule` share: a frozen keyword-only dataclass that replaces, sweeps, diffs, and round-trips through JSON."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import itertools
import json
from typing import Any, TypeVar

from .errors import ScheduleError, Violation

T = TypeVar("T", bound="Value")


class Value:
    """Mixin for frozen dataclasses whose fields are JSON values (tuples stand for lists)."""

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        return tuple(f.name for f in dataclasses.fields(cls))  # type: ignore[arg-type]

    def replace(self: T, **changes: Any) -> T:
        """A copy with some fields changed. An unknown name is a ScheduleError with code unknown-knob that suggests the closest ones."""
        self._check_names(changes)
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def sweep(self: T, **choices: Any) -> tuple[T, ...]:
        """Every combination: `sweep(tile_kv=(96, 128), stages=(2, 3))` is four values, the last field varying fastest."""
        self._check_names(choices)
        names = list(choices)
        return tuple(self.replace(**dict(zip(names, c))) for c in itertools.product(*(choices[n] for n in names)))

    def diff(self, other: Value) -> dict[str, tuple[Any, Any]]:
        """The fields in which the two differ: name → (mine, the other's)."""
        if type(self) is not type(other):
            raise TypeError(f"cannot diff {type(self).__name__} with {type(other).__name__}")
        pairs = {n: (getattr(self, n), getattr(other, n)) for n in self.field_names()}
        return {n: p for n, p in pairs.items() if p[0] != p[1]}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values of all fields."""
        return {n: list(v) if isinstance(v, tuple) else v for n in self.field_names() for v in [getattr(self, n)]}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls: type[T], data: dict[str, Any]) -> T:
        """Inverse of `to_dict`; an unknown or missing name is a ScheduleError."""
        cls._check_names(data)
        needed = [
            f.name
            for f in dataclasses.fields(cls)  # type: ignore[arg-type]
            if f.default is dataclasses.MISSING and f.name not in data
        ]
        if needed:
            raise ScheduleError(Violation("missing-knob", n, f"{cls.__name__} needs it") for n in needed)
        return cls(**{n: tuple(v) if isinstance(v, list) else v for n, v in data.items()})

    @classmethod
    def from_json(cls: type[T], text: str) -> T:
        return cls.from_dict(json.loads(text))

    @property
    def id(self) -> str:
        """Eight hex digits that name the value everywhere. Fields at their default do not enter, so a new field keeps old ids."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        set_ = {f.name: v for f in fields for v in [getattr(self, f.name)] if v != f.default or type(v) is not type(f.default)}
        return hashlib.sha256(json.dumps(set_, sort_keys=True).encode()).hexdigest()[:8]

    @classmethod
    def _check_names(cls, names: dict[str, Any]) -> None:
        known = cls.field_names()
        bad = [n for n in names if n not in known]
        if bad:
            raise ScheduleError(
                Violation("unknown-knob", n, f"{cls.__name__} has no such field", tuple(difflib.get_close_matches(n, known)))
                for n in bad
            )
