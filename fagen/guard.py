"""GPU work in a subprocess that is watched: a kernel that hangs costs seconds, not the session.

    with Watched("fagen.check.device:run", request) as worker:
        for message in worker.messages():
            ...

The task runs in a fresh Python (never a fork: a context does not survive one) in its own process group. It reports through a pipe of
JSON lines, and before each thing that may hang it says what it does and how long that may take. Overrun: the whole group is killed.
The parent's end, for whatever reason, ends the worker too. What a run leaves behind when it fails is a *bundle*, see `write_bundle`.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

from .errors import FagenError, InputError, InternalError, LaunchError

if TYPE_CHECKING:
    from .compile import Built
    from .plan import Plan

STARTUP_SECONDS = 120.0
"""For the interpreter and the imports, on a slow disk; no kernel runs yet."""
KILL_SECONDS = 10.0
"""How long a killed process may take to disappear (the driver tears down its context first) before we leave it to the system."""
LOG_BYTES = 1 << 16


class GuardError(LaunchError):
    """The worker did not finish. `kind`: "hang" (it overran its time), "death" (its process ended) or "fault" (the driver reported an
    error of the kernel). `doing`: what it was about. `log`: the end of its output. `record`: the debug record, () if there is none."""

    def __init__(self, kind: str, doing: str, detail: str, log: str = "", record: tuple[int, ...] = ()):
        self.kind, self.doing, self.detail, self.log, self.record = kind, doing, detail, log, record
        self.bundle: str | None = None
        """Where `explained` wrote its repro bundle."""
        super().__init__(f"{doing}: {detail}")

    def __reduce__(self) -> tuple[type, tuple[str, str, str, str, tuple[int, ...]]]:
        return (GuardError, (self.kind, self.doing, self.detail, self.log, self.record))


# ---------------------------------------------------------------------------------------------------------------- the worker


class Channel:
    """The worker's side of the pipe."""

    def __init__(self, pipe: BinaryIO):
        self._pipe = pipe

    def doing(self, what: str, seconds: float) -> None:
        """The next word from this worker comes within `seconds`, or it hangs."""
        self._write({"kind": "doing", "what": what, "seconds": seconds})

    def send(self, kind: str, **fields: Any) -> None:
        """A message for the parent: plain JSON values."""
        self._write({"kind": kind, **fields})

    def _write(self, message: Mapping[str, Any]) -> None:
        self._pipe.write(json.dumps(message).encode() + b"\n")
        self._pipe.flush()


def serve(descriptor: int) -> None:
    """Run the task named in the first line of standard input; report on `descriptor`. Ends the process."""
    order = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with os.fdopen(descriptor, "wb") as pipe:
        channel, status = Channel(pipe), 0
        try:
            module, _, function = order["task"].partition(":")
            getattr(importlib.import_module(module), function)(order["request"], channel)
            channel.send("done")
        except FagenError as e:
            channel.send("error", error=base64.b64encode(pickle.dumps(e)).decode())
        except Exception:  # a fault of ours: the parent sees that the process ended, and its last words
            traceback.print_exc()
            status = 1
        # After a fault of a kernel the context is dead, and the exit handlers of CUDA libraries may wait for it for ever.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _end_with_parent() -> None:
    """Standard input stays open as long as the parent lives."""
    while sys.stdin.buffer.read(1 << 16):
        pass
    os._exit(1)


# ---------------------------------------------------------------------------------------------------------------- the parent


class Watched:
    """A task in its own process, a context manager: leaving it kills what is left of the worker.

    `task`: "module:function", called as function(request, channel). `request`: plain JSON values.
    """

    def __init__(self, task: str, request: Mapping[str, Any], *, startup_seconds: float = STARTUP_SECONDS):
        self._order = json.dumps({"task": task, "request": dict(request)}).encode() + b"\n"
        self._startup = startup_seconds

    def __enter__(self) -> Watched:
        self._log = tempfile.TemporaryFile()
        self._reader, writer = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fagen.guard", str(writer)],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(writer,),
                start_new_session=True,  # its own process group, so that whatever it starts dies with it
                env={**os.environ, "PYTHONPATH": _python_path()},
            )
        finally:
            os.close(writer)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # died at once: `messages` tells
            self._process.stdin.write(self._order)
            self._process.stdin.flush()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._kill()
        os.close(self._reader)
        self._log.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def messages(self) -> Iterator[dict[str, Any]]:
        """What the task sends, until it is done. Raises GuardError if it hangs or dies, and the FagenError that the task raised."""
        doing, limit = "the worker starts", self._startup
        self._deadline = time.monotonic() + limit
        for line in self._lines():
            if line is None:
                self._kill()
                raise GuardError("hang", doing, f"no sign of life for {limit:g} s; the worker was killed", self._tail())
            message = json.loads(line)
            if message["kind"] == "doing":
                doing, limit = message["what"], float(message["seconds"])
                self._deadline = time.monotonic() + limit
            elif message["kind"] == "done":
                return
            elif message["kind"] == "error":
                raise self._raised(message["error"])
            else:
                yield message
                self._deadline = time.monotonic() + limit  # the time that the caller took is not the worker's
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_SECONDS)
        log = self._tail()
        last = "".join(f": {line}" for line in log.strip().splitlines()[-1:])
        raise GuardError("death", doing, f"the worker's process ended ({_exit_text(self._process.returncode)}){last}", log)

    def _lines(self) -> Iterator[bytes | None]:
        """Lines of the pipe; None when the deadline passes; ends with the pipe."""
        rest = b""
        while True:
            while b"\n" in rest:
                line, _, rest = rest.partition(b"\n")
                yield line
            ready, _, _ = select.select([self._reader], [], [], max(0.0, self._deadline - time.monotonic()))
            if not ready:
                yield None
                return
            data = os.read(self._reader, 1 << 16)
            if not data:
                return
            rest += data

    def _raised(self, encoded: str) -> FagenError:
        error = pickle.loads(base64.b64decode(encoded))
        if not isinstance(error, FagenError):
            raise InternalError(f"the worker reports a {type(error).__name__} as an error of the user: {error}")
        if isinstance(error, GuardError):
            error.log = error.log or self._tail()
        return error

    def _tail(self) -> str:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - LOG_BYTES))
        return self._log.read().decode(errors="replace")

    def _kill(self) -> None:
        process = self._process
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        try:
            process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"fagen: process {process.pid} does not end; the driver may need a while to stop its kernel", file=sys.stderr)


def _python_path() -> str:
    """The worker must import this fagen, from wherever it was imported here."""
    mine = str(Path(__file__).resolve().parent.parent)
    return os.pathsep.join([mine, *filter(None, [os.environ.get("PYTHONPATH")])])


def _exit_text(code: int | None) -> str:
    if code is None:
        return "how is not known"
    return f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


# ---------------------------------------------------------------------------------------------------------------- bundles

BUNDLE = "bundle.json"


def write_bundle(built: Built, facts: Mapping[str, Any], failure: GuardError | None = None, root: str | Path = "repro") -> Path:
    """A new directory under `root` with all that a rerun needs: the kernel (.cu, .cubin, .json of `built`, a `compile.Built`), bundle.json
    with `facts` (problem, seed, …), log.txt (the worker's output), record.txt (who stood where, from a debug build that trapped).

    Where `root` cannot be written, it goes to a temporary directory. Returns the directory.
    """
    from .compile import write_built

    name = built.source.name
    stamp = time.strftime("%Y%m%d-%H%M%S")
    try:
        Path(root).mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-{stamp}-", dir=root))
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix=f"fagen-repro-{name}-{stamp}-"))
    write_built(built, folder, name)
    content = {**facts, "name": name, "debug": built.plan.debug, "compiler": built.report.compiler}
    if failure is not None:
        content |= {"failure": failure.kind, "doing": failure.doing, "detail": failure.detail, "record": list(failure.record)}
        (folder / "log.txt").write_text(failure.log)
        told = record_text(failure, built.plan)
        if told:
            (folder / "record.txt").write_text(told + "\n")
    (folder / BUNDLE).write_text(json.dumps(content, indent=2) + "\n")
    return folder


def record_text(failure: GuardError, plan: Plan) -> str:
    """Who stood where when a debug build of `plan` trapped; "" without a record."""
    if not any(failure.record):
        return ""
    from .debug import decode_record

    return decode_record(failure.record, plan) or ""


def explained(failure: GuardError, built: Built, facts: Mapping[str, Any], root: str | Path | None) -> LaunchError:
    """The failure as the user reads it: what happened, what the debug record tells, and the bundle (written under `root`, if any)."""
    lines = [str(failure), *filter(None, [record_text(failure, built.plan)])]
    if root is not None:
        folder = write_bundle(built, facts, failure, root)
        failure.bundle = str(folder)
        lines.append(f"repro bundle: {folder} (rerun: fagen repro {folder}; with --debug it names the barrier that hangs)")
    return LaunchError("\n".join(lines))


def read_bundle(folder: str | Path) -> dict[str, Any]:
    """The facts of a bundle; InputError if there is none."""
    path = Path(folder) / BUNDLE
    try:
        facts = json.loads(path.read_text())
    except OSError as e:
        raise InputError(str(folder), f"is not a repro bundle: {path.name} cannot be read ({e.strerror or e})") from e
    except ValueError as e:
        raise InputError(str(path), f"is not JSON: {e}") from e
    if not isinstance(facts, dict) or "name" not in facts or "case" not in facts:
        raise InputError(str(path), "is not a repro bundle's: name or case is missing")
    return facts


if __name__ == "__main__":
    from fagen.guard import serve as _serve  # not __main__'s: its exceptions must be the parent's classes

    _serve(int(sys.argv[1]))
