"""Global memory that kernels need beside their tensors (tile counters, accumulators), so that no launch allocates.

Two launches that may run at the same time must not share a workspace. Launches on one stream run one after another, and so do
launches captured from one stream in one capture; so the *owner* of a workspace is a stream, or a (stream, capture) for launches
that go into a CUDA graph, which may be replayed on any stream at any later time.

  up to 64 bytes   a slot of a pool that is allocated and zeroed once per device; a slot belongs to its owner for good
  larger           one buffer per owner, which grows outside captures. Memory cannot be allocated inside a capture, so a capture
                   takes over the buffer that a warm-up call on the same stream left behind (and must not be replayed before that
                   warm-up call is done)

A stream has one buffer of each name, the largest that was asked for, whichever kernels ask: a smaller one is freed before it grows,
after the launches that use it. What a capture took over is kept, since nothing here can tell when its graph is gone; `release` frees it
when a kernel is given back.
"""

from __future__ import annotations

import threading
from functools import cache
from itertools import count

from . import driver
from .errors import LaunchError

SLOT_BYTES = 64
SLOTS = 16384  # 1 MiB a device: enough for some ten thousand captured graphs

SINK_BYTES = 4 << 20
"""Of the place for an lse that nobody wants: a million rows, whose kernel takes so long that the host's time does not matter."""

MAX_READY = 4096
"""Kinds of launch (owner, use) whose addresses are remembered; then all are looked up anew."""

new_user = count(1).__next__
"""A number for a kernel, by which `release` knows its workspaces; never given twice, as an id() may be."""

Owner = int | tuple[int, int]
Request = tuple[str, int, bool]
"""Name, bytes, and whether it must be 0 (the kernel leaves it 0 for the next one)."""


class Use:
    """What the launches of a bound call of a kernel (`user`) ask for. Equal to itself only, which makes it a cheap key."""

    __slots__ = ("requests", "user")

    def __init__(self, user: int, requests: tuple[Request, ...]):
        self.user, self.requests = user, requests


class Workspaces:
    """The workspaces of all kernels on one device. Needs the device's context to be current when made and when asked."""

    def __init__(self, device: int):
        self._device = device
        self.lock = threading.RLock()
        """Held from `pointers` until the launch is queued: else a buffer could be freed, or used by another kernel, in between."""
        self._ready: dict[tuple[Owner, Use], tuple[int, ...]] = {}
        self._owners: dict[int, set[Owner]] = {}  # by user
        self._slots: dict[tuple[Owner, str, bool], int] = {}
        self._buffers: dict[tuple[Owner, str, bool], tuple[int, int]] = {}
        self._capture_status = driver.api().cuStreamIsCapturing
        pool = self._allocate(SLOT_BYTES * SLOTS, zeroed=True)
        self._free_slots = [pool + SLOT_BYTES * i for i in reversed(range(SLOTS))]

    def pointers(self, use: Use, stream: int) -> tuple[int, ...]:
        """Device addresses, in the order of the requests, for a launch on the stream. Only the owner's first call costs more than a
        look-up. The caller holds `lock`.

        LaunchError: the pool is exhausted, or a large workspace is missing inside a capture.
        """
        status, capturing = self._capture_status(stream)
        if not status and not capturing:
            found = self._ready.get((stream, use))
            if found is not None:
                return found
        return self._look_up(use, stream)

    def _look_up(self, use: Use, stream: int) -> tuple[int, ...]:
        capture = driver.capture_id(stream) if driver.is_capturing(stream) else 0
        owner: Owner = (stream, -capture) if capture else stream  # negative: never equal to a thread's number below
        if stream == driver.PER_THREAD_STREAM and not capture:
            owner = (stream, threading.get_ident())
        found = self._ready.get((owner, use))
        if found is None:
            self._owners.setdefault(use.user, set()).add(owner)
            found = tuple(self._provide(owner, stream, bool(capture), r) for r in use.requests)
            if len(self._ready) >= MAX_READY:
                self._ready.clear()
            self._ready[owner, use] = found
        return found

    def release(self, user: int) -> None:
        """Wait for the device, then free the large workspaces of every stream that the user launched on (the next launch there
        allocates again) and all that the captures it took part in hold: their graphs must not be replayed any more."""
        with self.lock:
            driver.synchronize()
            for owner in self._owners.pop(user, set()):
                self._forget(owner)
                for key in [k for k in self._buffers if k[0] == owner]:
                    driver.mem_free(self._buffers.pop(key)[0])
                if isinstance(owner, tuple) and owner[1] < 0:  # a capture; its kernels left the slots as they found them
                    self._free_slots += [self._slots.pop(k) for k in list(self._slots) if k[0] == owner and k[2]]

    def _provide(self, owner: Owner, stream: int, capturing: bool, request: Request) -> int:
        name, nbytes, zeroed = request
        key = (owner, name, zeroed)
        if nbytes <= SLOT_BYTES:
            if key not in self._slots:
                if not self._free_slots:
                    raise LaunchError(
                        f"all {SLOTS} workspace slots of cuda:{self._device} are taken: every stream, and every captured CUDA graph, "
                        "keeps one; launch on fewer streams, capture fewer graphs in one process, or unload kernels whose graphs are gone"
                    )
                self._slots[key] = self._free_slots.pop()
            return self._slots[key]
        ptr, size = self._buffers.get(key, (0, 0))
        if size >= nbytes:
            return ptr
        if capturing:
            ptr, size = self._buffers.get((stream, name, zeroed), (0, 0))
            if size < nbytes:
                raise LaunchError(
                    f"the workspace {name!r} ({nbytes} bytes) cannot be allocated while stream {stream:#x} captures a CUDA graph: "
                    "warm up first, with the same call on the same stream"
                )
            del self._buffers[stream, name, zeroed]
            self._forget(stream)
        else:
            if size:
                driver.stream_synchronize(stream)  # earlier launches may still use the smaller one
                self._forget(owner)
                del self._buffers[key]  # before the allocation, which may fail
                driver.mem_free(ptr)
            ptr, size = self._allocate(nbytes, zeroed), nbytes
        self._buffers[key] = ptr, size
        return ptr

    def _forget(self, owner: Owner) -> None:
        for key in [k for k in self._ready if k[0] == owner]:
            del self._ready[key]

    def _allocate(self, nbytes: int, zeroed: bool) -> int:
        ptr = driver.mem_alloc(nbytes)
        if zeroed:
            stream = driver.own_stream(self._device)
            driver.memset(ptr, 0, nbytes, stream)
            driver.stream_synchronize(stream)
        return ptr


@cache
def workspaces(device: int) -> Workspaces:
    """Those of a device. The first call allocates, so it must not happen while a CUDA graph is captured."""
    with driver.use_device(device):
        return Workspaces(device)


_sinks: dict[int, int] = {}
_sinks_lock = threading.Lock()


def sink(device: int, stream: int) -> int:
    """Address of SINK_BYTES on a device that every launch may write and nothing ever reads, so that all of them share it, on any stream
    and in any graph. Allocated once and kept; 0 if it is not there yet and `stream` captures, which forbids to allocate."""
    with _sinks_lock:
        if device not in _sinks:
            with driver.use_device(device):
                if driver.is_capturing(stream):
                    return 0
                _sinks[device] = driver.mem_alloc(SINK_BYTES)
        return _sinks[device]
