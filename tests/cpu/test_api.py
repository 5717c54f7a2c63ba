"""`import fagen`: quick, without a device, and with every verb in its place whatever was imported before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fagen
from fagen import Attention, InputError, ScheduleError, load

ROOT = Path(__file__).resolve().parent.parent.parent


def python(code: str) -> str:
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return answer.stdout.strip()


def test_import_is_light() -> None:
    heavy = "{'numpy', 'cuda', 'jinja2', 'rich', 'click', 'ml_dtypes', 'torch'}"
    assert python(f"import sys, fagen; print(sorted({heavy} & set(sys.modules)))") == "[]"


@pytest.mark.parametrize(
    "before",
    [
        "",
        "import fagen.compile",
        "from fagen.compile import build",
        "fagen.simulate",
        "from fagen.api import compile",
        "import fagen.api",
    ],
)
def test_compile_is_the_function_whatever_was_imported(before: str) -> None:
    code = f"import fagen\n{before}\nimport types\nprint(type(fagen.compile).__name__, callable(fagen.compile), fagen.compile.__module__)"
    assert python(code) == "function True fagen.api"


def test_the_module_can_still_be_imported_from() -> None:
    code = "import fagen; fagen.compile; from fagen.compile import build; import importlib; print(importlib.import_module('fagen.compile').build is build)"
    assert python(code) == "True"


def test_every_public_name_exists() -> None:
    assert set(fagen.__all__) <= set(dir(fagen))
    for name in fagen.__all__:
        assert getattr(fagen, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'compiel'"):
        fagen.compiel  # noqa: B018


def qkv(dtype: Any = ml_dtypes.bfloat16) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, n, h, 64)).astype(dtype) for n, h in ((70, 4), (130, 2), (130, 2)))
    return q, k, v


@pytest.mark.parametrize("name", ["fa2", "fa3"])
def test_compile_simulate_and_reference_speak_of_the_same_kernel(name: str) -> None:
    attention, schedule = load(name, head_dim=64, mask="causal")
    kernel = fagen.compile(attention, schedule)
    assert isinstance(kernel, fagen.Kernel)
    assert kernel.plan == fagen.plan(attention, schedule)
    assert 'extern "C" __global__' in kernel.source and kernel.cubin[:4] == b"\x7fELF"
    assert not kernel.report.broken()
    q, k, v = qkv()
    out, lse = fagen.simulate(attention, schedule, q, k, v)
    want, want_lse = fagen.reference(attention, q, k, v)
    assert out.dtype == ml_dtypes.bfloat16 and lse.dtype == np.float32 and want.dtype == np.float64
    np.testing.assert_allclose(out.astype(np.float64), want, atol=0.02)
    np.testing.assert_allclose(lse, want_lse, atol=1e-4)


def test_a_debug_kernel_is_another_kernel() -> None:
    attention, schedule = load("fa2", head_dim=64)
    kernel = fagen.compile(attention, schedule, debug=True)
    assert kernel.plan.debug and kernel.source != fagen.compile(attention, schedule).source


def test_mistakes_are_named() -> None:
    attention, schedule = load("fa2")
    with pytest.raises(ScheduleError, match="head-dim"):
        fagen.compile(Attention(head_dim=80), schedule)
    q, k, v = qkv()
    with pytest.raises(InputError, match=r"^q: has head_dim 64; the attention's is 128"):
        fagen.simulate(attention, schedule, q, k, v)
    with pytest.raises(InputError, match=r"^v: "):
        fagen.reference(Attention(head_dim=64), q, k, v[:, :5])
