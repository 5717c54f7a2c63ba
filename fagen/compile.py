"""Source → Built: the cubin of a plan, with a report that must keep the plan's promises; and built kernels on disk.

The promises (broken ones are a CompileError): no spill and no local memory, no ptxas advisory that means lost speed, no serialised
WGMMA batch, and in the machine code exactly the matrix, wait, barrier and copy instructions that the program implies.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import cache, debug, nvrtc, sass, trace
from .attention import Attention
from .emit import Source
from .errors import CompileError, FagenError, InputError
from .evidence import to_text
from .nvrtc import Compiled, compile_cubin
from .plan import Plan, plan, removal
from .plan.steps import walk
from .report import DOUBTFUL_ADVISORY, CompileReport, kernel_report, parse_log
from .schedule import Schedule

__all__ = ["Built", "Compiled", "build", "compile_cubin", "load_built", "write_built"]


@dataclass(frozen=True)
class Built:
    """A plan with its source, its machine code and the compiler's report."""

    plan: Plan
    source: Source
    cubin: bytes
    report: CompileReport


def build(plan: Plan, source: Source, *, allow_spill_bytes: int = 0, use_cache: bool = True, enforce: bool = True) -> Built:
    """Compile the source of a plan and check the result against the plan.

    `allow_spill_bytes`: spills tolerated per thread (explored schedules). `enforce` False: broken promises stay in the report
    (`report.broken()`) instead of raising; for sources edited by hand. Raises CompileError; its `log` is the compiler's.
    """
    if plan.debug:
        allow_spill_bytes = max(allow_spill_bytes, debug.SPILL_BYTES)
    if plan.trace:
        allow_spill_bytes = max(allow_spill_bytes, trace.SPILL_BYTES)
    if plan.without:
        allow_spill_bytes = max(allow_spill_bytes, removal.SPILL_BYTES)
    ids = frozenset(step.id for kernel in plan.kernels for role in kernel.roles for step in walk(role.body))
    compiled, code = _cached(source, ids) if use_cache else _fresh(source, ids)
    report = _report(plan, source, compiled, code)
    broken = report.broken(allow_spill_bytes)
    if enforce and broken:
        raise CompileError(f"{source.name} compiles, but not to what was planned:\n" + "\n".join(broken), compiled.log)
    return Built(plan, source, compiled.cubin, report)


def _report(plan: Plan, source: Source, compiled: Compiled, code: Mapping[str, sass.KernelSass] | None) -> CompileReport:
    resources = parse_log(compiled.log)
    missing = [k.name for k in plan.kernels if k.name not in resources or code is not None and k.name not in code]
    if missing:
        raise CompileError(
            f"{source.name}: no kernel {missing[0]!r} in the source; it has {', '.join(resources) or 'none'}", compiled.log
        )
    kernels = tuple(kernel_report(k, resources[k.name], code[k.name] if code else None) for k in plan.kernels)
    notes = []
    if code is None:
        notes.append(f"SASS not read (instruction counts, registers by role, serialised batches): no nvdisasm; {sass.INSTALL}")
        if any(DOUBTFUL_ADVISORY in k.advisories for k in kernels):
            notes.append(f"advisory {DOUBTFUL_ADVISORY} not judged: only the SASS tells whether it holds")
    return CompileReport(source.arch, compiled.compiler, compiled.seconds, kernels, tuple(notes))


# ---------------------------------------------------------------------------------------------------------------- cache


def _fresh(source: Source, ids: frozenset[str]) -> tuple[Compiled, dict[str, sass.KernelSass] | None]:
    compiled = compile_cubin(source.text, source.arch, source.name, step_ids=ids)
    return compiled, sass.analyse(compiled.cubin)


def _cached(source: Source, ids: frozenset[str]) -> tuple[Compiled, dict[str, sass.KernelSass] | None]:
    """As `_fresh`, through the user's cache. An entry made where there was no nvdisasm, or by a version that counted other instructions, is
    completed where there is one."""
    try:
        store = cache.default()
    except OSError:  # not even a temporary directory (the warning has been given): every build compiles
        return _fresh(source, ids)
    key = cache.key(source.text, nvrtc.options(source.arch), nvrtc.compiler())
    label = {"name": source.name, "arch": source.arch, "compiler": nvrtc.compiler()}
    compiled, code = _unpack(store.fetch(key, lambda: _pack(*_fresh(source, ids)), label))
    if code is None and sass.nvdisasm() is not None:
        code = sass.analyse(compiled.cubin)
        store.store(key, _pack(compiled, code), label, replace=True)
    return compiled, code


def _pack(compiled: Compiled, code: Mapping[str, sass.KernelSass] | None) -> dict[str, bytes]:
    facts = {
        "compiler": compiled.compiler,
        "seconds": compiled.seconds,
        "sass": None if code is None else {name: k.to_dict() for name, k in code.items()},
    }
    return {"kernel.cubin": compiled.cubin, "log.txt": compiled.log.encode(), "facts.json": json.dumps(facts).encode()}


def _unpack(files: cache.Files) -> tuple[Compiled, dict[str, sass.KernelSass] | None]:
    facts = json.loads(files["facts.json"])
    compiled = Compiled(files["kernel.cubin"], files["log.txt"].decode(), facts["compiler"], facts["seconds"])
    code = {name: sass.KernelSass.from_dict(k) for name, k in (facts["sass"] or {}).items()}
    current = all(k.counts.keys() == set(sass.COUNTED) for k in code.values())
    return compiled, code if code and current else None


# ---------------------------------------------------------------------------------------------------------------- on disk


def write_built(built: Built, directory: str | Path, name: str) -> tuple[Path, Path, Path]:
    """Write NAME.cu, NAME.cubin and NAME.json; returns their paths.

    What NAME.json holds beside the build (evidence, variants) is kept; evidence of other code is marked `"stale": true`. The files
    appear one by one, each whole, the .json last; if anything fails before, none of them has changed. InputError if `directory` or
    an existing NAME.json is unusable.
    """
    folder = Path(directory)
    paths = tuple(folder / f"{name}{end}" for end in (".cu", ".cubin", ".json"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        record = _read_json(paths[2]) if paths[2].exists() else {}
        contents = (built.source.text.encode(), built.cubin, _record_text(record, built))
        _replace_all(dict(zip(paths, contents)))
    except OSError as e:
        raise InputError(str(e.filename or folder), f"cannot be written: {e.strerror or e}") from e
    return paths[0], paths[1], paths[2]


def load_built(directory: str | Path, name: str, removed: str = "") -> Built:
    """Read what `write_built` wrote, without compiling: for a machine with another NVRTC, or none. `removed`: what the kernel must have
    been built without, since a kernel that a removal made computes something wrong.

    Raises InputError naming the file that is missing, unreadable, or does not belong to the others, and where this version of fagen
    plans another kernel than the one built (its arguments would not fit).
    """
    source_path, cubin_path, record_path = (Path(directory) / f"{name}{end}" for end in (".cu", ".cubin", ".json"))
    record = _read_json(record_path)
    text, cubin = _read(source_path).decode(errors="replace"), _read(cubin_path)
    try:
        attention, schedule = Attention.from_dict(record["attention"]), Schedule.from_dict(record["schedule"])
        report = CompileReport.from_dict(record["report"])
        code, machine, interface, is_debug = (record[k] for k in ("code_sha256", "cubin_sha256", "interface_sha256", "debug"))
        planned = plan(attention, schedule, debug=bool(is_debug), trace=bool(record.get("trace", False)))
        if removed:
            planned = removal.without(planned, removed)
    except (KeyError, TypeError, ValueError, AttributeError, FagenError) as e:
        raise InputError(str(record_path), f"is not the record of a kernel that this version can run: {e!r}") from e
    if (found := record.get("without", "")) != removed:
        raise InputError(str(record_path), f"was built {_state(found)}; {_state(removed)} is needed")
    source = Source(text=text, arch=schedule.arch, kernels=tuple(k.name for k in planned.kernels), name=name)
    if source.code_sha256 != code:
        raise InputError(
            str(source_path), f"is not the source of which {record_path.name} speaks (its code hashes to another value)"
        )
    if hashlib.sha256(cubin).hexdigest() != machine:
        raise InputError(str(cubin_path), f"is not the machine code of which {record_path.name} speaks (its hash is another)")
    if report.arch != schedule.arch:
        raise InputError(str(cubin_path), f"was compiled for {report.arch}, the schedule is for {schedule.arch}")
    if interface != _interface_sha256(planned):
        raise InputError(
            str(record_path), "was built by another version of fagen, whose kernels take other arguments: build it again"
        )
    return Built(planned, source, cubin, report)


def _state(removed: str) -> str:
    return f"without {removed}" if removed else "as a whole kernel"


def _record_text(record: dict[str, Any], built: Built) -> bytes:
    """NAME.json: the new build, and of the old record everything else."""
    code = built.source.code_sha256
    fresh = {
        "attention": built.plan.attention.to_dict(),
        "schedule": built.plan.schedule.to_dict(),
        "debug": built.plan.debug,
        **({"trace": True} if built.plan.trace else {}),
        "code_sha256": code,
        "cubin_sha256": hashlib.sha256(built.cubin).hexdigest(),
        "interface_sha256": _interface_sha256(built.plan),
        "report": built.report.to_dict(),
    }
    if built.plan.without:
        fresh["without"] = built.plan.without
    kept = {k: v for k, v in record.items() if k not in (*fresh, "trace", "without")}
    evidence = kept.get("evidence")
    if isinstance(evidence, dict):
        evidence.pop("stale", None)
        if evidence.get("code_sha256") != code:
            evidence["stale"] = True
    return to_text({**fresh, **kept}).encode()


def _interface_sha256(plan: Plan) -> str:
    """Hash of everything a launch takes from the plan: two plans of one interface can launch each other's cubins."""
    kernels = [(k.name, k.threads, k.pointers, k.params, k.maps, k.smem_bytes, k.grid) for k in plan.kernels]
    return hashlib.sha256(repr((kernels, plan.workspaces)).encode()).hexdigest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise InputError(str(path), f"cannot be read: {e.strerror or e}") from e


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(_read(path))
    except ValueError as e:
        raise InputError(str(path), f"is not JSON: {e}") from e
    if not isinstance(data, dict):
        raise InputError(str(path), "is not a JSON object")
    return data


def _replace_all(contents: Mapping[Path, bytes]) -> None:
    """Write every file beside its place first, then move them all in."""
    ready: list[tuple[str, Path]] = []
    try:
        for path, data in contents.items():
            fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
            ready.append((temporary, path))
            with os.fdopen(fd, "wb") as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
            os.chmod(temporary, 0o644)
        while ready:
            os.replace(*ready[0])
            ready.pop(0)
    finally:
        for temporary, _ in ready:
            Path(temporary).unlink(missing_ok=True)
