"""The generated CUDA, line by line, beside tests/golden. After a meant change: pytest tests/cpu/test_golden.py --update-golden."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import fagen
from fagen.emit import emit

FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "fa2.cu": ("fa2", {}),
    "fa3.cu": ("fa3", {}),
    "fa3_causal.cu": ("fa3", {"mask": "causal"}),
}


@pytest.mark.parametrize("file", FILES)
def test_golden(file: str, golden: Callable[[str, str], None]) -> None:
    name, changes = FILES[file]
    golden(file, emit(fagen.plan(*fagen.load(name, **changes)), file.removesuffix(".cu")).text)
