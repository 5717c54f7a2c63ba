"""Evidence files: written whole, merged, and fresh only for exactly the code they belong to."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fagen import Attention, InputError, evidence
from fagen.cli.common import variants_of
from fagen.oracle import CheckProblem, Verdict

ABOUT = {"gpu": "NVIDIA H200", "driver": "580.95.05, CUDA 13.0", "compiler": "NVRTC 13.5.37"}
GOOD = evidence.case(CheckProblem(1, 64, 65, 2, 1), "full", Verdict(True, 0.001, 0.004, 0.25))
BAD = evidence.case(CheckProblem(1, 64, 65, 2, 1), "full", Verdict(False, float("inf"), 0.0, float("inf"), "NaN"))


def read(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def test_names_of_attentions() -> None:
    name = evidence.variant_id
    assert name(Attention(head_dim=128)) == "hd128-bf16-full"
    assert name(Attention(head_dim=64, dtype="fp16", mask="causal")) == "hd64-fp16-causal"
    assert name(Attention(head_dim=192, head_dim_v=128)) == "hd192x128-bf16-full"
    assert name(Attention(head_dim=128, dtype="e4m3", out_dtype="bf16")) == "hd128-e4m3-full"
    assert name(Attention(head_dim=128, dtype="e4m3", out_dtype="fp16")) == "hd128-e4m3-fp16-full"
    assert name(Attention(head_dim=64, out_dtype="bf16")) == name(Attention(head_dim=64)), "the same kernel"
    grid = variants_of(Attention(head_dim=128))
    names = {name(Attention(**v)) for v in grid}
    rare = [{"scale": 0.5}, {"scale": 0.25}, {"softcap": 30.0}, {"sink": True}, {"mask": "window", "window": (5, 0)}]
    names |= {name(Attention(head_dim=64, **r)) for r in rare}  # type: ignore[arg-type]
    assert len(names) == len(grid) + len(rare)


def test_a_case_has_the_documented_keys() -> None:
    assert GOOD == {
        "shape": [1, 2, 1, 64, 65],
        "mask": "full",
        "inputs": "normal",
        "layout": "contiguous",
        "error": 0.001,
        "bound": 0.004,
        "error_ratio": 0.25,
        "passed": True,
    }
    assert BAD["error"] is None and BAD["reason"] == "NaN"


def test_cases_of_one_attention_leave_the_others_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "fa3.json"
    evidence.store(path, "aa", [GOOD], **ABOUT)
    evidence.store(path, "bb", [GOOD, GOOD], **ABOUT, variant="hd64-fp16-full")
    evidence.store(path, "cc", [BAD], **ABOUT, variant="hd64-bf16-full")
    data = read(path)
    assert set(data) == {"evidence", "variants"}
    assert data["evidence"]["code_sha256"] == "aa" and data["evidence"]["cases"] == [GOOD]
    assert {n: data["evidence"][n] for n in ABOUT} == ABOUT and len(data["evidence"]["date"]) == 10
    assert list(data["variants"]) == ["hd64-bf16-full", "hd64-fp16-full"]
    evidence.store(path, "dd", [GOOD], **ABOUT, variant="hd64-bf16-full")
    again = read(path)
    assert again["variants"]["hd64-bf16-full"]["code_sha256"] == "dd"
    assert again["evidence"] == data["evidence"]
    assert again["variants"]["hd64-fp16-full"] == data["variants"]["hd64-fp16-full"]


def test_a_build_record_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "fa3.json"
    path.write_text(
        json.dumps({"report": {"arch": "sm_90a"}, "code_sha256": "aa", "evidence": {"code_sha256": "old", "stale": True}})
    )
    evidence.store(path, "aa", [GOOD], **ABOUT)
    data = read(path)
    assert data["report"] == {"arch": "sm_90a"} and "stale" not in data["evidence"]


def test_state() -> None:
    def state(entry: Any, **options: Any) -> str:
        return evidence.state({"evidence": entry}, "aa", **options)

    cases = [GOOD] * 3
    assert state({"code_sha256": "aa", "cases": cases}) == "fresh"
    assert state({"code_sha256": "ab", "cases": cases}) == "stale"
    assert state({"code_sha256": "aa", "cases": [*cases, BAD]}) == "failed"
    assert state({"code_sha256": "ab", "cases": [*cases, BAD]}) == "stale"
    assert state({"code_sha256": "aa", "cases": []}) == "none"
    assert state({"code_sha256": "aa", "cases": cases}, min_cases=4) == "none"
    assert state({"code_sha256": "aa", "cases": cases}, variant="hd64-fp16-full") == "none"
    assert state({"code_sha256": "aa", "cases": cases, "checks": {"racecheck": {"passed": False}}}) == "failed"
    assert evidence.state({}, "aa") == "none"
    variants = {"variants": {"hd64-fp16-full": {"code_sha256": "aa", "cases": cases}}}
    assert evidence.state(variants, "aa", "hd64-fp16-full") == "fresh"


def test_other_checks_stand_beside_the_cases_and_belong_to_the_code(tmp_path: Path) -> None:
    path = tmp_path / "fa3.json"
    evidence.store(path, "aa", [GOOD], **ABOUT)
    evidence.record(path, "memcheck", {"errors": 0, "passed": True}, code_sha256="aa")
    evidence.record(path, "jitter", {"runs": 100, "passed": True}, code_sha256="aa")
    checks = read(path)["evidence"]["checks"]
    assert checks["memcheck"]["errors"] == 0 and checks["jitter"]["runs"] == 100
    with pytest.raises(InputError, match="no evidence of this code for the file's own attention; check it first"):
        evidence.record(path, "memcheck", {}, code_sha256="bb")
    with pytest.raises(InputError, match="hd64-fp16-full"):
        evidence.record(path, "memcheck", {}, code_sha256="aa", variant="hd64-fp16-full")
    evidence.store(path, "aa", [GOOD, GOOD], **ABOUT)
    assert read(path)["evidence"]["checks"] == checks, "the same code: what was found still holds"
    evidence.store(path, "bb", [GOOD], **ABOUT)
    assert "checks" not in read(path)["evidence"], "of the new code it is not known"


def test_the_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "fa3.json"
    evidence.store(path, "aa", [GOOD], **ABOUT)
    before = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=r"fa3.json: cannot be written: No space left on device"):
        evidence.store(path, "bb", [GOOD], **ABOUT)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["fa3.json"]


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_file_of_another_kind_is_refused_and_kept(tmp_path: Path, content: str) -> None:
    path = tmp_path / "fa3.json"
    path.write_text(content)
    with pytest.raises(InputError, match=r"fa3.json: is not"):
        evidence.store(path, "aa", [GOOD], **ABOUT)
    assert path.read_text() == content
    with pytest.raises(InputError, match="cannot be read"):
        evidence.read(tmp_path)
    assert evidence.read(tmp_path / "nothing.json") == {}


def test_a_case_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "fa3.json"
    odd = {**BAD, "reason": 'a "quoted"  text with {braces} and \\u00001'}
    path.write_text(json.dumps({"report": {"kernels": [{"name": "attention"}]}}))
    evidence.store(path, "aa", [GOOD, odd], **ABOUT)
    evidence.store(path, "bb", [GOOD], **ABOUT, variant="hd64-fp16-full")
    assert path.read_text().count('{"shape": [1, 2, 1, 64, 65], ') == 3
    data = read(path)
    assert data["evidence"]["cases"] == [GOOD, odd] and data["variants"]["hd64-fp16-full"]["cases"] == [GOOD]
    assert data["report"] == {"kernels": [{"name": "attention"}]}
