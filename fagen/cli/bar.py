"""A progress bar on stderr for work in phases: rich's on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from . import common


class Bar:
    """One phase. Shown at once; `step` is called for each thing done. `total` None: not known, so that only the time runs."""

    def __init__(self, what: str, total: int | None = None):
        self._what, self._total = what, total
        self._lines: common.Progress | None = None
        self._rich: Any = None

    def __enter__(self) -> Bar:
        if not sys.stderr.isatty():
            self._lines = common.Progress(self._what, self._total or 0)
            return self
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = [
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[about]}"),
        ]
        if self._total is not None:
            columns.insert(3, MofNCompleteColumn())
        self._rich = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._rich.add_task(self._what, total=self._total, about="")
        self._rich.start()
        return self

    def step(self, about: str) -> None:
        """One more is done."""
        if self._lines is not None:
            self._lines.step(about)
        else:
            self._rich.update(self._task, advance=1, about=about[:60])

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._lines is not None:
            self._lines.close()
        else:
            self._rich.stop()
