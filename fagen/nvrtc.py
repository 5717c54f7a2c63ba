"""Source → cubin, by NVIDIA's run-time compiler. Needs no GPU, no driver, no toolkit and no headers.

Called through `cuda.bindings.nvrtc`, the C interface itself, and not through `cuda.core.Program`: the options that reach the
compiler are then exactly the ones that enter the cache's key, whatever the version of cuda.core; the log of a failed compile comes
back whole; and nothing on the way asks for a device. The library is the one of the `nvidia-cuda-nvrtc` wheel if that is installed
(or one already loaded by another package), before anything that CUDA_HOME or the system offers.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
import time
from collections.abc import Container
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from .errors import CompileError

OPTIONS = ("-std=c++17", "-default-device", "--use_fast_math", "-no-cache", "--ptxas-options=-v")
"""After -arch. Fast math flushes denormals and lets division and log use the approximate instructions (one per row, at the end);
infinities and NaN keep their meaning. `-v`: the log names registers and spills of every kernel. `-no-cache`: NVRTC 13.0 answers a
source it has seen from a cache of its own, without that log."""

INSTALL = "pip install nvidia-cuda-nvrtc cuda-bindings"

_WHEEL = "nvidia-cuda-nvrtc"
_SOURCE_ERROR = re.compile(r"^[^\n(]*\((\d+)\): (?:catastrophic )?(error\b.*)$", re.MULTILINE)
_PTX_ERROR = re.compile(r"^ptxas .*?ptx input, line (\d+); error\s*: (.*)$", re.MULTILINE)
_ANY_ERROR = re.compile(r"^.*\b(?:error|fatal)\b.*$", re.MULTILINE)
_LOC = re.compile(r"^\s*\.loc\s+\d+\s+(\d+)(?:.*inlined_at\s+\d+\s+(\d+))?")
_STEP = re.compile(r"[a-z_]\w*(?:\.\w+)+")


@dataclass(frozen=True)
class Compiled:
    """A cubin, the compiler's whole log, which compiler it was ("NVRTC 13.5.37") and how long it took."""

    cubin: bytes
    log: str
    compiler: str
    seconds: float


def options(arch: str) -> tuple[str, ...]:
    """The compiler's command line for a target such as "sm_90a". No include path: generated sources include nothing."""
    return (f"-arch={arch}", *OPTIONS)


def compile_cubin(text: str, arch: str, name: str, *, step_ids: Container[str] | None = None) -> Compiled:
    """Compile CUDA source `text` to the machine code of exactly `arch`; `name` stands for the file in messages.

    Raises CompileError: with the first error, the source line it points at and the step it is part of (told by comments: see
    `step_at`), and the whole log; or with what to install where there is no NVRTC.
    """
    file = name if name.endswith(".cu") else f"{name}.cu"
    nvrtc = _nvrtc()
    start = time.perf_counter()
    program = _program(nvrtc, text, file)
    try:
        flags = [o.encode() for o in options(arch)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode(errors="replace").rstrip("\0\n ")
        if int(status):
            raise CompileError(_explain(nvrtc, log, status.name, text, arch, file, step_ids), log)
        cubin = _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Compiled(cubin, log, _identify(), round(time.perf_counter() - start, 3))


# ---------------------------------------------------------------------------------------------------------------- the library


@lru_cache(maxsize=1)
def compiler() -> str:
    """Name and version of the NVRTC that compiles here, as exactly as can be known: "NVRTC 13.5.37".

    Asked for by every cache look-up, so the library (140 MB) is loaded only where no wheel tells its version. CompileError where
    there is none.
    """
    return _identify()


def _identify() -> str:
    wheel = _wheel_library()
    loaded = _loaded_library()
    if wheel and loaded in (None, wheel[0]):
        return f"NVRTC {wheel[1]}"
    major, minor = _version(_nvrtc())
    path = _loaded_library()
    exact = re.search(r"\.so\.(\d+\.\d+\.\d+)$", path.name) if path else None  # a toolkit's file: libnvrtc.so.13.0.88
    return f"NVRTC {exact[1]}" if exact else f"NVRTC {major}.{minor}"


def _nvrtc() -> Any:
    """The bindings, with the library behind them loaded: the wheel's by its path, since the bindings' own search covers neither
    PYTHONPATH nor `pip install --target`, and could take another than the one that `compiler` names."""
    wheel = _wheel_library()
    try:
        from cuda.bindings import nvrtc

        if wheel and _loaded_library() is None:
            for path in (
                *wheel[0].parent.glob("libnvrtc-builtins.so.*"),
                wheel[0],
            ):  # older wheels do not find their builtins themselves
                ctypes.CDLL(str(path))
        _version(nvrtc)
    except (ImportError, OSError, RuntimeError) as e:
        first = next(iter(str(e).splitlines()), type(e).__name__)
        raise CompileError(f"no NVRTC to compile with: {INSTALL} (the loader says: {first})", str(e)) from e
    return nvrtc


def _version(nvrtc: Any) -> tuple[int, int]:
    _, major, minor = nvrtc.nvrtcVersion()
    return int(major), int(minor)


def _wheel_library() -> tuple[Path, str] | None:
    """(library, version) of the wheel, if its major version is the bindings'."""
    try:
        wheel = importlib.metadata.distribution(_WHEEL)
        bindings = importlib.metadata.version("cuda-bindings")
    except importlib.metadata.PackageNotFoundError:
        return None
    wanted = f"libnvrtc.so.{bindings.split('.')[0]}"
    for f in wheel.files or ():
        if f.name == wanted and (path := Path(str(f.locate())).resolve()).exists():
            return path, wheel.version
    return None


def _loaded_library() -> Path | None:
    """The NVRTC already mapped into this process: another package (PyTorch) may have brought its own, and that one is then used."""
    try:
        maps = Path("/proc/self/maps").read_text(errors="replace")
    except OSError:
        return None
    found = re.search(r"\s(/\S.*/libnvrtc\.so\S*)$", maps, re.MULTILINE)
    return Path(found[1]).resolve() if found else None


def _program(nvrtc: Any, text: str, file: str) -> Any:
    status, program = nvrtc.nvrtcCreateProgram(text.encode(), file.encode(), 0, [], [])
    if int(status):
        raise CompileError(f"{file}: NVRTC cannot take the source ({status.name})")
    return program


def _text(size: Any, get: Any, program: Any) -> bytes:
    """Fetch one of a program's outputs: its size, then its bytes into a buffer."""
    status, n = size(program)
    buffer: bytes = b" " * n
    (status,) = get(program, buffer) if not int(status) else (status,)
    if int(status):
        raise CompileError(f"NVRTC gave no output ({status.name})")
    return buffer


# ---------------------------------------------------------------------------------------------------------------- messages


def _explain(nvrtc: Any, log: str, status: str, text: str, arch: str, file: str, step_ids: Container[str] | None) -> str:
    """The first error of the log, with its source line and step. ptxas counts lines of PTX, which are traced back."""
    if found := _SOURCE_ERROR.search(log):
        line = int(found[1])
        return _at(text, file, line, found[2], [line], step_ids)
    if found := _PTX_ERROR.search(log):
        lines = _source_lines(nvrtc, text, arch, file, int(found[1]))
        if lines:
            return _at(text, file, lines[0], f"error in the PTX: {found[2]}", lines, step_ids)
    if first := _ANY_ERROR.search(log):
        return f"{file}: {first[0].strip()}"
    return f"{file}: NVRTC fails with {status}"


def _at(text: str, file: str, line: int, message: str, lines: list[int], step_ids: Container[str] | None) -> str:
    source = text.splitlines()
    step = next((s for n in reversed(lines) if (s := step_at(source, n, step_ids))), None)
    shown = [f"{n:>6} | {source[n - 1].strip()}" for n in lines if 0 < n <= len(source)]
    by = [f"in step {step}"] if step else []
    return "\n".join([f"{file}({line}): {message}", *shown, *by])


def step_at(source: list[str], line: int, step_ids: Container[str] | None) -> str | None:
    """The innermost step named in a comment on `line` (from 1), on a line that encloses it (less indented, as sources are printed),
    or right above one of these. `step_ids`: what counts as one; None: any dotted name."""
    indent, adjacent = 1 << 30, True
    for text in reversed(source[:line]):
        code = text.strip()
        if code.startswith("#"):
            continue  # #pragma unroll stands between a comment and its loop
        depth = len(text) - len(text.lstrip())
        comment_above = adjacent and code.startswith("//") and depth == indent
        if code and (depth < indent or comment_above):
            for word in _STEP.findall(text.partition("//")[2]):
                if step_ids is None or word in step_ids:
                    return str(word)
            indent, adjacent = depth, True
        else:
            adjacent = False
        if indent == 0 and not adjacent:
            return None
    return None


def _source_lines(nvrtc: Any, text: str, arch: str, file: str, ptx_line: int) -> list[int]:
    """Source lines of a line of PTX, innermost first: the helper's, then its callers'. Empty if it cannot be told.

    The same source is compiled once more, to PTX with line marks; but for these marks that is the PTX that ptxas read.
    """
    program = _program(nvrtc, text, file)
    try:
        flags = [o.encode() for o in (f"-arch={arch.replace('sm_', 'compute_')}", *OPTIONS[:-1], "-lineinfo")]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
        if int(status):
            return []
        ptx = _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).decode(errors="replace")
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    here, callers, n = 0, {}, 0
    for row in ptx.splitlines():
        if mark := _LOC.match(row):
            here = int(mark[1])
            if mark[2]:
                callers[here] = int(mark[2])
            continue
        n += 1
        if n == ptx_line:
            break
    chain = [here] if here else []
    while chain and (caller := callers.get(chain[-1])) and caller not in chain:
        chain.append(caller)
    return chain
