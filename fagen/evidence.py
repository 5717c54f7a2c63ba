"""Evidence: what a GPU showed of exactly this code, kept in NAME.json for machines that have none.

    "evidence": {"code_sha256", "gpu", "driver", "compiler", "date", "cases": [...], "checks": {...}}     the file's own attention
    "variants": {id: {"code_sha256", "gpu", …, "cases", "checks"}}                                        others under its schedule

A case is {"shape": [B, HQ, HKV, SQ, SK], "mask", "inputs", "layout", "error", "bound", "error_ratio", "passed"}. `checks` holds what
other tools said: {"memcheck": {...}, "jitter": {...}}. Evidence belongs to the hash of the code it ran: `state` compares.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .attention import Attention
from .errors import InputError

if TYPE_CHECKING:
    from .oracle import CheckProblem, Verdict

State = Literal["fresh", "stale", "failed", "none"]
MIN_CASES = 60
"""Cases that a built-in schedule's evidence needs."""


def variant_id(attention: Attention) -> str:
    """Names an attention in files and evidence: "hd64-fp16-causal", "hd128-int8-v_bf16-full". Rarer fields add the value's id, so that no two
    share a name."""
    dv = "" if attention.dv == attention.head_dim else f"x{attention.dv}"
    v = "" if attention.v_dtype is None else f"-v_{attention.v_dtype}"
    out = "" if attention.output_dtype == attention.replace(out_dtype=None).output_dtype else f"-{attention.output_dtype}"
    plain = Attention(
        head_dim=attention.head_dim,
        head_dim_v=attention.head_dim_v,
        dtype=attention.dtype,
        v_dtype=attention.v_dtype,
        out_dtype=attention.out_dtype,
        mask=attention.mask,
    )
    rare = "" if attention == plain else f"-{attention.id}"
    return f"hd{attention.head_dim}{dv}-{attention.dtype}{v}{out}-{attention.mask}{rare}"


def case(problem: CheckProblem, mask: str, verdict: Verdict) -> dict[str, Any]:
    """One checked case as plain JSON values; an infinite error (NaN or inf in the wrong place) is null."""
    numbers = {n: x if math.isfinite(x) else None for n in ("error", "bound", "error_ratio") for x in [float(getattr(verdict, n))]}
    shape = [problem.batch, problem.hq, problem.hkv, problem.sq, problem.sk]
    about = {"shape": shape, "mask": mask, "inputs": problem.inputs, "layout": problem.layout}
    return {**about, **numbers, "passed": verdict.passed, **({"reason": verdict.reason} if verdict.reason else {})}


def store(
    path: str | Path,
    code_sha256: str,
    cases: Sequence[Mapping[str, Any]],
    *,
    gpu: str,
    driver: str,
    compiler: str,
    variant: str | None = None,
) -> None:
    """Put the cases of one attention into a record, new or existing; `variant` None: the file's own attention.

    Replaces that attention's cases, and keeps its `checks` if they belong to the same code; all else stays. The file appears whole.
    """
    record_ = _read(path)
    entry = {
        "code_sha256": code_sha256,
        "gpu": gpu,
        "driver": driver,
        "compiler": compiler,
        "date": datetime.date.today().isoformat(),
        "cases": list(cases),
    }
    old = _entry(record_, variant)
    if old.get("code_sha256") == code_sha256 and "checks" in old:
        entry["checks"] = old["checks"]
    _put(record_, variant, entry)
    _write(path, record_)


def record(path: str | Path, kind: str, result: Mapping[str, Any], *, code_sha256: str, variant: str | None = None) -> None:
    """Add what another check said ("memcheck", "racecheck", "jitter") of the code of that hash: plain JSON values.

    InputError if the record has no evidence of that code yet: a check without its cases says too little.
    """
    record_ = _read(path)
    entry = dict(_entry(record_, variant))
    if entry.get("code_sha256") != code_sha256:
        which = "the file's own attention" if variant is None else variant
        raise InputError(str(path), f"has no evidence of this code for {which}; check it first")
    entry["checks"] = {**entry.get("checks", {}), kind: {**result, "date": datetime.date.today().isoformat()}}
    _put(record_, variant, entry)
    _write(path, record_)


def state(record_: Mapping[str, Any], code_sha256: str, variant: str | None = None, *, min_cases: int = 1) -> State:
    """How the evidence in a record stands to the code of today.

    "none": there is none, or fewer cases than `min_cases`. "stale": it belongs to other code. "failed": a case or a check did not pass.
    """
    entry = _entry(record_, variant)
    cases = entry.get("cases") or []
    if not cases:
        return "none"
    if entry.get("code_sha256") != code_sha256:
        return "stale"
    if not all(c.get("passed") is True for c in cases) or not all(c.get("passed", True) for c in entry.get("checks", {}).values()):
        return "failed"
    return "fresh" if len(cases) >= min_cases else "none"


def read(path: str | Path) -> dict[str, Any]:
    """The record at `path`, {} if there is no such file; InputError if it is not a JSON object."""
    return _read(path)


def to_text(record_: Mapping[str, Any]) -> str:
    """A record as its file holds it: indented JSON, but a case a line, so that a diff shows which cases changed."""
    lines: list[str] = []

    def folded(entry: Any) -> Any:
        if not isinstance(entry, dict) or not isinstance(entry.get("cases"), list):
            return entry
        first = len(lines)
        lines.extend(json.dumps(c, allow_nan=False) for c in entry["cases"])
        return {**entry, "cases": [f"\0{first + i}" for i in range(len(entry["cases"]))]}

    plain = dict(record_)
    if "evidence" in plain:
        plain["evidence"] = folded(plain["evidence"])
    if isinstance(plain.get("variants"), dict):
        plain["variants"] = {n: folded(e) for n, e in plain["variants"].items()}
    text = json.dumps(plain, indent=2, allow_nan=False)
    return re.sub(r'"\\u0000(\d+)"', lambda m: lines[int(m[1])], text) + "\n"


# ---------------------------------------------------------------------------------------------------------------- inside


def _entry(record_: Mapping[str, Any], variant: str | None) -> Mapping[str, Any]:
    found = record_.get("evidence") if variant is None else (record_.get("variants") or {}).get(variant)
    return found if isinstance(found, dict) else {}


def _put(record_: dict[str, Any], variant: str | None, entry: Mapping[str, Any]) -> None:
    if variant is None:
        record_["evidence"] = dict(entry)
    else:
        record_["variants"] = dict(sorted({**(record_.get("variants") or {}), variant: dict(entry)}.items()))


def _read(path: str | Path) -> dict[str, Any]:
    try:
        data = json.loads(Path(path).read_text())
    except FileNotFoundError:
        return {}
    except OSError as e:
        raise InputError(str(path), f"cannot be read: {e.strerror or e}") from e
    except ValueError as e:
        raise InputError(str(path), f"is not JSON: {e}") from e
    if not isinstance(data, dict):
        raise InputError(str(path), "is not a JSON object")
    return data


def _write(path: str | Path, record_: Mapping[str, Any]) -> None:
    target = Path(path)
    text = to_text(record_)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(descriptor, "w") as f:
                f.write(text)
                f.flush()
                os.fsync(f.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as e:
        raise InputError(str(path), f"cannot be written: {e.strerror or e}") from e
