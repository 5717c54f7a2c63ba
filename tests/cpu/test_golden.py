"""The generated CUDA, line by line: of the built-in schedules beside generated/, which `fagen build NAME` writes (evidence of a GPU
belongs to it, see `fagen ls`), of others beside tests/golden. After a meant change: pytest tests/cpu/test_golden.py --update-golden."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fagen
from fagen.emit import emit
from fagen.library import builtin_names

FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "fa3_causal.cu": ("fa3", {"mask": "causal"}),
}
GENERATED = Path(__file__).parents[2] / "generated"


@pytest.mark.parametrize("name", builtin_names())
def test_what_is_kept_in_generated_is_what_is_emitted(name: str) -> None:
    kept = (GENERATED / f"{name}.cu").read_text(encoding="utf-8")
    assert kept.splitlines() == emit(fagen.plan(*fagen.load(name)), name).text.splitlines()


@pytest.mark.parametrize("file", FILES)
def test_golden(file: str, golden: Callable[[str, str], None]) -> None:
    name, changes = FILES[file]
    golden(file, emit(fagen.plan(*fagen.load(name, **changes)), file.removesuffix(".cu")).text)
