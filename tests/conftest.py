"""What all tests share: a compile cache of the session's own, and golden files with a switch to rewrite them."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# No test modules, yet a failure in them has to say what was found.
pytest.register_assert_rewrite("grid", "fake_cuda", "trace_source")

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden from what is emitted now")


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Compiled kernels go to a directory of this session (the same for all its workers), never to the user's cache."""
    base = tmp_path_factory.getbasetemp()
    path = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "fagen-cache"
    path.mkdir(mode=0o700, exist_ok=True)
    with pytest.MonkeyPatch.context() as m:
        m.setenv("FAGEN_CACHE_DIR", str(path))
        yield path


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)`: `text` is what tests/golden/`name` holds, or becomes it under --update-golden."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        want = path.read_text(encoding="utf-8") if path.exists() else ""
        diff = list(difflib.unified_diff(want.splitlines(), text.splitlines(), f"golden/{name}", "emitted now", lineterm="", n=1))
        if diff:
            shown = "\n".join(diff[:60])
            pytest.fail(f"{len(diff)} lines of difference (pytest --update-golden accepts them):\n{shown}", pytrace=False)

    return compare
