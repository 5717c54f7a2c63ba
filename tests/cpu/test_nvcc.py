"""The generated file compiles as it stands with nvcc, from NVIDIA's compiler wheels or the PATH."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

import pytest

import fagen
from fagen.emit import emit
from fagen.report import parse_log

GENCODE = {"sm_80": "80", "sm_90": "90", "sm_90a": "90a"}


@lru_cache(maxsize=1)
def nvcc() -> Path | None:
    """The wheel's nvcc if its parts (nvvm, crt, runtime headers) are there as well, else the one on the PATH."""
    try:
        files = importlib.metadata.files("nvidia-cuda-nvcc") or []
        for wheel in ("nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime"):
            importlib.metadata.version(wheel)
        found = [Path(str(f.locate())) for f in files if f.name == "nvcc"]
    except importlib.metadata.PackageNotFoundError:
        found = []
    on_path = shutil.which("nvcc")
    return next((p for p in found if p.is_file()), Path(on_path) if on_path else None)


needs_nvcc = pytest.mark.skipif(nvcc() is None, reason="no nvcc: pip install 'fagen[nvcc]'")


@needs_nvcc
@pytest.mark.parametrize(
    "name, changes",
    [
        ("fa2", {}),
        ("fa2", {"arch": "sm_80", "head_dim": 64}),
        ("fa3", {}),
        ("fa3", {"mask": "causal", "head_dim": 64}),
        ("fa3_fp8", {}),
    ],
    ids=str,
)
def test_the_file_compiles_as_it_stands(name: str, changes: dict[str, object], tmp_path: Path) -> None:
    attention, schedule = fagen.load(name, **changes)
    source = emit(fagen.plan(attention, schedule), name)
    (tmp_path / f"{name}.cu").write_text(source.text, encoding="utf-8")
    number = GENCODE[schedule.arch]
    gencode = f"arch=compute_{number},code=sm_{number}"
    command = [str(nvcc()), "-gencode", gencode, "-cubin", "-Xptxas", "-v", "-Werror", "all-warnings", f"{name}.cu"]
    run = subprocess.run(command, cwd=tmp_path, env=os.environ | {"LC_ALL": "C"}, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / f"{name}.cubin").read_bytes().startswith(b"\x7fELF")
    log = parse_log(run.stderr)
    assert list(log) == list(source.kernels)
    assert all(k.spill_stores == k.spill_loads == k.stack_bytes == 0 for k in log.values()), run.stderr
