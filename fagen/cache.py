"""A disk cache of compiled kernels, safe with any number of processes.

An entry is a directory named after the hash of everything that decides its content (source text, options with the target, compiler
version, this format), so nothing is ever looked up by name or time. It appears by one rename of a directory written and synced
aside: at every instant it is whole or absent. A manifest holds the hash of each file; what does not match is built anew. A lock
owned by the operating system (it dies with its process) keeps processes from compiling the same thing at once; without a working
lock they do, and the first to publish wins.

Place: FAGEN_CACHE_DIR, else $XDG_CACHE_HOME/fagen, else ~/.cache/fagen; created with mode 0700 at the first use, never at import.
Bound: FAGEN_CACHE_MAX_BYTES (512 MiB); the entries unused for longest go first.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from .errors import InputError

FORMAT = 1
"""Part of every key: raise it when the files of an entry change their meaning."""
MAX_BYTES = 512 << 20
PATIENCE = 120.0
"""Seconds to wait for another process that compiles the same kernel, before compiling it here as well."""

_MANIFEST = "manifest.json"
_STALE_TMP = 3600.0  # seconds after which a directory left aside by a killed process is removed
Files = Mapping[str, bytes]


def key(text: str, options: tuple[str, ...], compiler: str) -> str:
    """The name of what `compiler` makes of `text` under `options` (which hold the target): 64 hex digits, alike in all processes."""
    return hashlib.sha256(json.dumps([FORMAT, compiler, list(options), text]).encode()).hexdigest()


@dataclass(frozen=True)
class Entry:
    """An entry as `ls` shows it: size of all its files, time of last use (seconds since the epoch), and its label."""

    key: str
    bytes: int
    used: float
    label: dict[str, str]


@dataclass(frozen=True)
class Cache:
    """The cache in directory `root`, which exists and is ours."""

    root: Path
    max_bytes: int = MAX_BYTES
    patience: float = PATIENCE

    def fetch(self, key: str, make: Callable[[], Files], label: Mapping[str, str] | None = None) -> Files:
        """The files of `key`: from disk, or from `make()`, which is then stored. What `make` raises passes through."""
        found = self.load(key)
        if found is not None:
            return found
        with self._single_flight(key):
            found = self.load(key)  # another process may have been faster
            if found is None:
                found = make()
                self.store(key, found, label or {})
        return found

    def load(self, key: str) -> Files | None:
        """The files of an entry, or None if it is absent or damaged. Marks it as used."""
        path = self._path(key)
        try:
            manifest = json.loads((path / _MANIFEST).read_bytes())
            files = {name: (path / name).read_bytes() for name in manifest["files"]}
            if manifest["format"] != FORMAT or any(_sha256(data) != manifest["files"][name] for name, data in files.items()):
                return None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        with contextlib.suppress(OSError):
            os.utime(path / _MANIFEST)
        return files

    def store(self, key: str, files: Files, label: Mapping[str, str], *, replace: bool = False) -> None:
        """Publish an entry. If it exists already, ours is dropped, unless theirs is damaged or we `replace` it. A disk that refuses is
        a warning, not an error: the caller has the files."""
        try:
            self._publish(key, files, label, replace)
            self.prune()
        except OSError as e:
            warnings.warn(f"the compiled kernel could not be kept in {self.root}: {e.strerror or e}", RuntimeWarning, stacklevel=3)

    def ls(self) -> tuple[Entry, ...]:
        """All entries, the most recently used first."""
        return tuple(Entry(path.name, size, used, _label(path)) for path, size, used in self._by_use())

    def prune(self, max_bytes: int | None = None) -> tuple[Entry, ...]:
        """Remove the longest unused entries until at most `max_bytes` (None: the bound) are left, and what killed processes left.
        Returns the entries that went."""
        bound = self.max_bytes if max_bytes is None else max_bytes
        total, gone = 0, []
        for path, size, used in self._by_use():
            total += size
            if total > bound:
                gone.append(Entry(path.name, size, used, _label(path)))
                self._remove(path)
        now = time.time()
        for path in (*self._aside().glob("*"), *self._locks().glob("*.lock")):
            with contextlib.suppress(OSError):
                if now - path.stat().st_mtime > _STALE_TMP:
                    _delete(path)
        return tuple(gone)

    def clear(self) -> tuple[Entry, ...]:
        """Remove every entry. Returns what went."""
        return self.prune(max_bytes=0)

    # on disk --------------------------------------------------------------------------------------------------------------

    def _entries(self) -> Path:
        return self.root / f"v{FORMAT}"

    def _aside(self) -> Path:
        return self.root / "tmp"

    def _locks(self) -> Path:
        return self.root / "locks"

    def _path(self, key: str) -> Path:
        return self._entries() / key[:2] / key

    def _by_use(self) -> list[tuple[Path, int, float]]:
        """Every entry's directory, bytes and time of last use, the latest first. A damaged entry counts as never used."""
        found = []
        for path in self._entries().glob("*/*"):
            with contextlib.suppress(OSError):  # evicted by another process meanwhile
                stats = {f.name: f.stat() for f in os.scandir(path)}
                used = stats[_MANIFEST].st_mtime if _MANIFEST in stats else 0.0
                found.append((path, sum(s.st_size for s in stats.values()), used))
        return sorted(found, key=lambda x: -x[2])

    def _publish(self, key: str, files: Files, label: Mapping[str, str], replace: bool) -> None:
        self._aside().mkdir(mode=0o700, exist_ok=True)
        mine = Path(tempfile.mkdtemp(prefix=f"{key[:16]}-", dir=self._aside()))
        try:
            for name, data in files.items():
                _write(mine / name, data)
            manifest = {"format": FORMAT, "label": dict(label), "files": {n: _sha256(d) for n, d in files.items()}}
            _write(mine / _MANIFEST, json.dumps(manifest, indent=1).encode())
            _sync(mine)
            final = self._path(key)
            final.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _rename(mine, final) and (replace or self.load(key) is None):
                self._remove(final)
                _rename(mine, final)  # if another process was faster again, its entry is as good
            _sync(final.parent)
        finally:
            shutil.rmtree(mine, ignore_errors=True)  # nothing is there any more if it was published

    def _remove(self, path: Path) -> None:
        """Take an entry away in one instant, then delete it at leisure."""
        self._aside().mkdir(mode=0o700, exist_ok=True)
        grave = Path(tempfile.mkdtemp(prefix="gone-", dir=self._aside()))
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, grave / path.name)
        shutil.rmtree(grave, ignore_errors=True)

    @contextlib.contextmanager
    def _single_flight(self, key: str) -> Iterator[None]:
        """Hold the lock of `key` if it can be had within `patience`; say so on stderr when that takes over a second."""
        from filelock import FileLock, Timeout

        path = self._locks() / f"{key}.lock"
        lock = None
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            lock = FileLock(path, mode=0o600)
            try:
                lock.acquire(timeout=min(1.0, self.patience))
            except Timeout:
                print(
                    f"fagen: waiting for another process that compiles the same kernel (lock {path})", file=sys.stderr, flush=True
                )
                lock.acquire(timeout=max(0.0, self.patience - 1.0))
        except Timeout:
            print(
                f"fagen: after {self.patience:g} s the lock {path} is still held; compiling without it", file=sys.stderr, flush=True
            )
            lock = None
        except (OSError, NotImplementedError):  # a file system without locks: at worst a kernel is compiled twice
            lock = None
        try:
            yield
        finally:
            if lock is not None:
                path.unlink(missing_ok=True)  # whoever comes later finds the entry before looking for a lock
                lock.release()


def _label(path: Path) -> dict[str, str]:
    try:
        return {str(k): str(v) for k, v in json.loads((path / _MANIFEST).read_bytes())["label"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {"name": "(damaged)"}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def _sync(directory: Path) -> None:
    """Make the names in a directory last through a power cut. Some file systems cannot; then the hashes of the manifest decide."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)


def _rename(source: Path, target: Path) -> bool:
    """Rename a directory unless the target exists."""
    try:
        os.rename(source, target)
    except OSError as e:
        if e.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            return False
        raise
    return True


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------------------- the user's cache


def default() -> Cache:
    """The cache that the environment names. An unusable FAGEN_CACHE_DIR is an InputError; an unusable default place is one warning,
    and a private temporary directory takes its place until the process ends."""
    names = ("FAGEN_CACHE_DIR", "XDG_CACHE_HOME", "HOME", "FAGEN_CACHE_TRUST")
    return Cache(_root(*(os.environ.get(n, "") for n in names)), _bound(os.environ.get("FAGEN_CACHE_MAX_BYTES", "")))


def ls() -> tuple[Entry, ...]:
    """Entries of the user's cache, the most recently used first."""
    return default().ls()


def prune(max_bytes: int | None = None) -> tuple[Entry, ...]:
    """Shrink the user's cache to `max_bytes` (None: its bound); returns the entries removed."""
    return default().prune(max_bytes)


def clear() -> tuple[Entry, ...]:
    """Empty the user's cache; returns the entries removed."""
    return default().clear()


def _bound(text: str) -> int:
    if not text:
        return MAX_BYTES
    if not text.isascii() or not text.isdigit():
        raise InputError("FAGEN_CACHE_MAX_BYTES", f"{text!r} is not a number of bytes")
    return int(text)


@lru_cache(maxsize=8)
def _root(explicit: str, xdg: str, home: str, trust: str) -> Path:
    """The directory to use, made and checked. Its arguments are the environment variables, "" for those not set."""
    trusted = trust == "1"
    if explicit:
        place = Path(explicit).expanduser().absolute()
        if reason := _unusable(place, trusted):
            raise InputError("FAGEN_CACHE_DIR", f"{place} cannot be the cache: {reason}")
        return place
    if os.path.isabs(xdg):
        place, reason = Path(xdg) / "fagen", ""
    else:
        place = Path(home or "~") / ".cache" / "fagen"
        reason = "" if os.path.isdir(home) else f"HOME is {home!r}, which is no directory" if home else "HOME is not set"
    reason = reason or _unusable(place, trusted)
    if not reason:
        return place
    warnings.warn(
        f"{place} cannot be the cache of compiled kernels ({reason}); they are kept in a temporary directory "
        "until this process ends. FAGEN_CACHE_DIR names another place.",
        RuntimeWarning,
        stacklevel=3,
    )
    return _temporary()


def _unusable(place: Path, trusted: bool) -> str:
    """Why a directory cannot hold the cache, or ""; makes it (mode 0700) if it is not there."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.mkdir(mode=0o700, exist_ok=True)
        status = place.stat()
        if not os.access(place, os.R_OK | os.W_OK | os.X_OK):
            return "it cannot be written"
    except (OSError, ValueError) as e:
        return f"{getattr(e, 'strerror', None) or e}"
    if trusted:
        return ""
    if status.st_uid != os.geteuid():
        return f"it belongs to another user (uid {status.st_uid}); FAGEN_CACHE_TRUST=1 loads kernels from it all the same"
    if status.st_mode & 0o022:
        return f"others may write in it (mode {status.st_mode & 0o777:o}); FAGEN_CACHE_TRUST=1 loads kernels from it all the same"
    return ""


def _temporary() -> Path:
    """A directory for this process alone, removed when it ends."""
    place, owner = Path(tempfile.mkdtemp(prefix="fagen-cache-")), os.getpid()
    atexit.register(lambda: shutil.rmtree(place, ignore_errors=True) if os.getpid() == owner else None)
    return place
