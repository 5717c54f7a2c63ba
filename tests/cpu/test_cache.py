"""The disk cache, with a fake compiler: atomic, single-flight, self-healing, bounded, and polite about bad directories."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import filelock
import pytest

from fagen import cache
from fagen.cache import Cache
from fagen.errors import InputError

KEY = cache.key("source", ("-arch=sm_90a",), "NVRTC 13.5.37")
FILES = {"kernel.cubin": b"\x7fELF" + bytes(range(256)), "log.txt": b"ptxas info", "facts.json": b"{}"}

# A process that fetches one key through a compiler that appends a line to `calls`, writes `ready`, and takes `seconds`.
CHILD = """
import sys, time
from pathlib import Path
from fagen.cache import Cache
root, key, calls, seconds = sys.argv[1:]
def make():
    with open(calls, "a") as f:
        f.write(key[:4] + "\\n")
    time.sleep(float(seconds))
    return {"kernel.cubin": key.encode() * 100, "log.txt": b"log"}
files = Cache(Path(root)).fetch(key, make)
sys.stdout.write(files["kernel.cubin"].decode()[:64])
"""


def environment(**changes: str) -> dict[str, str]:
    """For processes that import this fagen, from wherever they are started."""
    return {**os.environ, "PYTHONPATH": str(Path(cache.__file__).parents[1]), **changes}


def child(root: Path, key: str, calls: Path, seconds: float) -> subprocess.Popen[str]:
    args = [sys.executable, "-c", CHILD, str(root), key, str(calls), str(seconds)]
    return subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())


def never() -> cache.Files:
    raise AssertionError("compiled although the cache holds it")


def leftovers(root: Path) -> list[Path]:
    return [*root.glob("tmp/*"), *root.glob("locks/*")]


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


# ------------------------------------------------------------------------------------------------------------------- keys


def test_key_holds_everything_that_decides_the_cubin() -> None:
    base = ("source", ("-arch=sm_90a", "-v"), "NVRTC 13.5.37")
    others = [
        ("source ", *base[1:]),
        ("source", ("-arch=sm_90", "-v"), base[2]),
        ("source", ("-arch=sm_90a",), base[2]),
        ("source", ("-arch=sm_90a -v",), base[2]),
        (*base[:2], "NVRTC 13.0.88"),
    ]
    keys = {cache.key(*x) for x in (base, *others)}
    assert len(keys) == 1 + len(others)
    assert all(len(k) == 64 for k in keys)


def test_key_is_the_same_in_every_process(tmp_path: Path) -> None:
    code = "from fagen import cache; print(cache.key('source', ('-arch=sm_90a',), 'NVRTC 13.5.37'))"
    for seed in ("0", "1"):
        env = environment(PYTHONHASHSEED=seed, HOME=str(tmp_path))
        out = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert out.stdout.strip() == KEY


# ---------------------------------------------------------------------------------------------------------------- hits and misses


def test_a_hit_gives_what_the_miss_gave(tmp_path: Path) -> None:
    store = Cache(tmp_path)
    assert store.load(KEY) is None
    assert store.fetch(KEY, lambda: FILES, {"name": "fa3"}) == FILES
    assert Cache(tmp_path).fetch(KEY, never) == FILES
    (entry,) = store.ls()
    assert (entry.key, entry.label) == (KEY, {"name": "fa3"})
    assert entry.bytes > sum(map(len, FILES.values()))
    assert leftovers(tmp_path) == []


def test_a_hit_takes_milliseconds(tmp_path: Path) -> None:
    store = Cache(tmp_path)
    store.store(KEY, {"kernel.cubin": os.urandom(100_000)}, {})
    best = min(_timed(lambda: store.load(KEY)) for _ in range(5))
    assert best < 0.01


def _timed(call: object) -> float:
    start = time.perf_counter()
    assert callable(call) and call() is not None
    return time.perf_counter() - start


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "manifest", "no manifest", "other format", "empty"])
def test_damaged_entries_are_built_anew(tmp_path: Path, damage: str) -> None:
    store = Cache(tmp_path)
    store.store(KEY, FILES, {})
    (path,) = tmp_path.glob("v1/*/*")
    cubin, manifest = path / "kernel.cubin", path / "manifest.json"
    if damage == "truncated":
        cubin.write_bytes(FILES["kernel.cubin"][:-1])
    elif damage == "flipped":
        cubin.write_bytes(FILES["kernel.cubin"][:-1] + b"\x00")
    elif damage == "missing":
        cubin.unlink()
    elif damage == "manifest":
        manifest.write_text("[]")
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "other format":
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 0}))
    else:
        for f in path.iterdir():
            f.unlink()
    assert store.load(KEY) is None
    store.ls()  # shows what it can
    assert store.fetch(KEY, lambda: FILES) == FILES
    assert store.fetch(KEY, never) == FILES
    assert leftovers(tmp_path) == []


def test_the_first_to_publish_wins_unless_replaced(tmp_path: Path) -> None:
    store = Cache(tmp_path)
    store.store(KEY, FILES, {})
    store.store(KEY, {**FILES, "log.txt": b"second"}, {})
    assert store.load(KEY) == FILES
    store.store(KEY, {**FILES, "log.txt": b"third"}, {}, replace=True)
    assert store.load(KEY) == {**FILES, "log.txt": b"third"}
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_compile_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def interrupted() -> cache.Files:
        raise error

    with pytest.raises(error):
        Cache(tmp_path).fetch(KEY, interrupted)
    assert leftovers(tmp_path) == [] and Cache(tmp_path).ls() == ()
    assert Cache(tmp_path, patience=0.0).fetch(KEY, lambda: FILES) == FILES


def test_a_full_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(cache, "_write", full)
    with pytest.warns(RuntimeWarning, match="could not be kept in .*No space left"):
        assert Cache(tmp_path).fetch(KEY, lambda: FILES) == FILES
    assert leftovers(tmp_path) == [] and Cache(tmp_path).load(KEY) is None


# ------------------------------------------------------------------------------------------------------------------- processes


def test_many_processes_compile_each_key_once(tmp_path: Path) -> None:
    root, calls = tmp_path / "cache", tmp_path / "calls"
    root.mkdir()
    keys = [KEY] * 4 + ["0" * 64, "1" * 64]
    children = [child(root, k, calls, 0.3) for k in keys]
    for key, process in zip(keys, children):
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, key), err
    assert sorted(calls.read_text().split()) == sorted({k[:4] for k in keys})
    assert len(Cache(root).ls()) == 3 and leftovers(root) == []


def test_two_threads_compile_once(tmp_path: Path) -> None:
    made: list[int] = []

    def make() -> cache.Files:
        made.append(1)
        time.sleep(0.1)
        return FILES

    threads = [threading.Thread(target=lambda: Cache(tmp_path).fetch(KEY, make)) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(made) == 1


def test_a_killed_compile_holds_nobody_up(tmp_path: Path) -> None:
    root, calls = tmp_path / "cache", tmp_path / "calls"
    root.mkdir()
    victim = child(root, KEY, calls, 600)
    try:
        wait_for(calls)
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.communicate(timeout=20)
    start = time.monotonic()
    assert Cache(root).fetch(KEY, lambda: FILES) == FILES
    assert time.monotonic() - start < 5
    assert len(Cache(root).ls()) == 1 and leftovers(root) == []


def test_a_live_holder_is_waited_for_with_a_message_and_a_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "locks").mkdir()
    lock = tmp_path / "locks" / f"{KEY}.lock"
    with filelock.FileLock(lock):
        start = time.monotonic()
        assert Cache(tmp_path, patience=1.3).fetch(KEY, lambda: FILES) == FILES
        assert 1.2 < time.monotonic() - start < 5
    captured = capsys.readouterr()
    first, second = captured.err.splitlines()
    assert captured.out == "" and str(lock) in first and str(lock) in second
    assert "waiting" in first and "1.3 s" in second


def test_a_lock_file_left_behind_is_no_lock(tmp_path: Path) -> None:
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks" / f"{KEY}.lock").write_text("another host, 12345")
    assert Cache(tmp_path, patience=0.0).fetch(KEY, lambda: FILES) == FILES


def test_without_working_locks_it_still_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoLocks:
        def __init__(self, *args: object, **kwargs: object) -> None: ...

        def acquire(self, timeout: float) -> None:
            raise NotImplementedError("no flock here")

    monkeypatch.setattr(filelock, "FileLock", NoLocks)
    assert Cache(tmp_path).fetch(KEY, lambda: FILES) == FILES
    assert Cache(tmp_path).fetch(KEY, never) == FILES


# ------------------------------------------------------------------------------------------------------------------- bound


def test_the_longest_unused_go_first(tmp_path: Path) -> None:
    store = Cache(tmp_path, max_bytes=5000)
    keys = [str(i) * 64 for i in range(3)]
    for age, key in zip((300, 200, 100), keys):
        store.store(key, {"kernel.cubin": bytes(1200)}, {"name": key[0]})
        then = time.time() - age
        os.utime(next(tmp_path.glob(f"v1/*/{key}")) / "manifest.json", (then, then))
    assert store.load(keys[0]) is not None  # used now: key 1 is the oldest
    store.store("9" * 64, {"kernel.cubin": bytes(1200)}, {})
    assert {e.key for e in store.ls()} == {keys[0], keys[2], "9" * 64}
    assert [e.key for e in store.prune(max_bytes=3000)] == [keys[2]]
    assert {e.key for e in store.clear()} == {keys[0], "9" * 64}
    assert store.ls() == () and leftovers(tmp_path) == []


def test_prune_removes_what_killed_processes_left(tmp_path: Path) -> None:
    for path, age in ((tmp_path / "tmp" / "old", 7200), (tmp_path / "tmp" / "new", 10)):
        path.mkdir(parents=True)
        (path / "half.cubin").write_bytes(b"x")
        os.utime(path, (time.time() - age, time.time() - age))
    Cache(tmp_path).prune()
    assert [p.name for p in leftovers(tmp_path)] == ["new"]


# ------------------------------------------------------------------------------------------------------------------- places


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A home of its own, no variable set."""
    for name in ("FAGEN_CACHE_DIR", "XDG_CACHE_HOME", "FAGEN_CACHE_TRUST", "FAGEN_CACHE_MAX_BYTES"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    cache._root.cache_clear()
    return monkeypatch


def test_default_place_is_made_privately(env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache.default() == Cache(tmp_path / "home/.cache/fagen", cache.MAX_BYTES)
    assert (tmp_path / "home/.cache/fagen").stat().st_mode & 0o777 == 0o700
    cache.default().store(KEY, FILES, {})
    assert [e.key for e in cache.ls()] == [KEY] and cache.prune() == ()
    assert [e.key for e in cache.clear()] == [KEY] and cache.ls() == ()


def test_import_does_not_touch_the_disk(env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", "import fagen, fagen.cache"], check=True, env=environment(PYTHONDONTWRITEBYTECODE="1"))
    assert list((tmp_path / "home").iterdir()) == []


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"FAGEN_CACHE_DIR": "{tmp}/a b'\"c"}, "a b'\"c"),
        ({"FAGEN_CACHE_DIR": "{tmp}/kärnel-核/" + "x" * 200}, "kärnel-核/" + "x" * 200),
        ({"FAGEN_CACHE_DIR": "relative/dir"}, "relative/dir"),
        ({"FAGEN_CACHE_DIR": "~/mine"}, "home/mine"),
        ({"FAGEN_CACHE_DIR": "", "XDG_CACHE_HOME": "{tmp}/xdg"}, "xdg/fagen"),
        ({"XDG_CACHE_HOME": "not/absolute"}, "home/.cache/fagen"),
        ({"FAGEN_CACHE_DIR": "{tmp}/first", "XDG_CACHE_HOME": "{tmp}/xdg"}, "first"),
    ],
)
def test_places_by_environment(env: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str], place: str) -> None:
    for name, value in variables.items():
        env.setenv(name, value.replace("{tmp}", str(tmp_path)))
    store = cache.default()
    assert store.root == tmp_path / place
    assert store.fetch(KEY, lambda: FILES) == store.fetch(KEY, never) == FILES


@pytest.mark.parametrize("home", [None, "", "/nonexistent/home", "relative"])
def test_without_a_home_one_warning_and_a_temporary_place(env: pytest.MonkeyPatch, home: str | None) -> None:
    env.delenv("HOME") if home is None else env.setenv("HOME", home)
    with pytest.warns(RuntimeWarning, match=r"cannot be the cache.*HOME.*FAGEN_CACHE_DIR") as caught:
        store = cache.default()
        assert store.fetch(KEY, lambda: FILES) == cache.default().fetch(KEY, never) == FILES
    assert len(caught) == 1
    assert store.root.stat().st_mode & 0o777 == 0o700


def test_an_unusable_default_is_a_warning_an_unusable_override_an_error(env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "home/.cache").write_text("a file")
    with pytest.warns(RuntimeWarning, match=r"home/\.cache/fagen cannot be the cache.*FAGEN_CACHE_DIR"):
        assert cache.default().root.is_dir()
    env.setenv("FAGEN_CACHE_DIR", str(tmp_path / "home/.cache"))
    with pytest.raises(InputError, match=r"FAGEN_CACHE_DIR: .*home/\.cache cannot be the cache"):
        cache.default()


def test_a_directory_that_cannot_be_written_is_refused(env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ro").mkdir(mode=0o555)
    env.setenv("FAGEN_CACHE_DIR", str(tmp_path / "ro"))
    env.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(InputError, match="cannot be written"):
        cache.default()


def test_a_directory_open_to_others_is_not_trusted(env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o775)
    env.setenv("FAGEN_CACHE_DIR", str(shared))
    with pytest.raises(InputError, match=r"others may write in it \(mode 775\); FAGEN_CACHE_TRUST=1"):
        cache.default()
    env.setenv("FAGEN_CACHE_TRUST", "1")
    assert cache.default().root == shared
    env.setenv("FAGEN_CACHE_TRUST", "0")
    shared.chmod(0o700)
    env.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(InputError, match="belongs to another user"):
        cache.default()


def test_the_bound_comes_from_the_environment(env: pytest.MonkeyPatch) -> None:
    env.setenv("FAGEN_CACHE_MAX_BYTES", "1234")
    assert cache.default().max_bytes == 1234
    for bad in ("-1", "1 GB", "1e9"):
        env.setenv("FAGEN_CACHE_MAX_BYTES", bad)
        with pytest.raises(InputError, match=f"FAGEN_CACHE_MAX_BYTES: '{bad}' is not a number of bytes"):
            cache.default()
