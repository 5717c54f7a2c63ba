"""Tasks for the guard's tests: what a worker may do, and what may become of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from fagen.errors import InputError
from fagen.guard import Channel, GuardError


def echo(request: Mapping[str, Any], channel: Channel) -> None:
    print("what a library prints must not disturb the messages")
    channel.doing("the echo", 30)
    for word in request["words"]:
        channel.send("word", text=word)


def hang(request: Mapping[str, Any], channel: Channel) -> None:
    print("about to hang", file=sys.stderr, flush=True)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    channel.send("pids", pids=[os.getpid(), child.pid])
    channel.doing("launch of fa3 on 1,2,1,64,64", request["seconds"])
    time.sleep(600)


def slow_but_alive(request: Mapping[str, Any], channel: Channel) -> None:
    for n in range(6):
        channel.doing(f"part {n}", 0.5)
        time.sleep(0.2)
    channel.send("word", text="done")


def end(request: Mapping[str, Any], channel: Channel) -> None:
    channel.doing("the end", 30)
    print("last words", flush=True)
    os._exit(7)


def crash(request: Mapping[str, Any], channel: Channel) -> None:
    channel.doing("the crash", 30)
    os.abort()


def mistake(request: Mapping[str, Any], channel: Channel) -> None:
    raise InputError("q", "is not what it should be")


def bug(request: Mapping[str, Any], channel: Channel) -> None:
    channel.doing("the sum", 30)
    raise ZeroDivisionError("a fault of ours")


def fault(request: Mapping[str, Any], channel: Channel) -> None:
    raise GuardError("fault", "launch of fa3", "cuStreamSynchronize failed", record=(1, 2, 3))
