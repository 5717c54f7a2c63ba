"""Checks on a device: right kernels pass, wrong ones fail, and one that hangs costs seconds, leaves a bundle, and leaves the GPU alive.

Kernels come from FAGEN_TEST_KERNELS, a folder that `fagen build fa2 fa3 --variants -o DIR` wrote, where this machine should not compile.
What must be compiled here (sources broken on purpose, debug builds) skips without NVRTC.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fagen import CompileError, LaunchError, driver, nvrtc
from fagen.check import Item, check_gpu, jitter_problems
from fagen.cli import common, run
from fagen.compile import Built, build
from fagen.emit import emit
from fagen.guard import read_bundle
from fagen.oracle import CheckProblem, check_problems, reference
from fagen.plan import plan

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("device")]
FOLDER = os.environ.get("FAGEN_TEST_KERNELS")
SMALL = (CheckProblem(2, 129, 200, 4, 2), CheckProblem(1, 5, 0, 2, 1), CheckProblem(1, 0, 9, 2, 1), CheckProblem(2, 64, 64, 8, 1))


@pytest.fixture
def compiler() -> None:
    try:
        nvrtc.compiler()
    except CompileError as e:
        pytest.skip(str(e))


def built(name: str, *settings: str) -> tuple[common.Selected, Built]:
    (item,) = common.select([name], settings)
    return item, common.built(item, folder=FOLDER)


def item_of(b: Built, problems: tuple[CheckProblem, ...]) -> Item:
    return Item(b.source.name, b.plan.attention, b.plan.schedule, problems)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("name", ["fa2", "fa3"])
def test_the_grid_passes(name: str, mask: str, dtype: str, tmp_path: Path) -> None:
    _, b = built(name, "head_dim=64", f"mask={mask}", f"dtype={dtype}")
    problems = check_problems(b.plan.attention, b.plan.schedule)
    outcome = check_gpu([item_of(b, problems)], [b], seed=1, repeat=2, bundles=tmp_path)
    assert len(outcome.results) == len(problems) >= 60
    assert [(str(r.problem), r.verdict.reason) for r in outcome.results if not r.verdict.passed] == []
    assert outcome.gpu == driver.device_info(0).name


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["check", "fa3", "--set", "head_dim=64", "--shape", "1,4,2,70,65", "--shape", "1,2,1,5,2", "--causal", "--json"]
    assert run([*arguments, *(["--from", FOLDER] if FOLDER else [])]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["device"], data["passed"], data["failed"]) == ("gpu", 2, 0) and data["gpu"]


def test_run_round_trips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, h, 64)).astype(ml_dtypes.bfloat16) for n, h in ((300, 4), (170, 2), (170, 2)))
    bits = {n: x.view(np.uint16) for n, x in zip("qkv", (q, k, v))}
    np.savez(tmp_path / "qkv.npz", **bits, q_dtype="bf16", k_dtype="bf16", v_dtype="bf16")
    files = ["--input", str(tmp_path / "qkv.npz"), "--output", str(tmp_path / "out.npz")]
    assert run(["run", "fa3", *files, "--set", "head_dim=64", "--causal", *(["--from", FOLDER] if FOLDER else [])]) == 0
    with np.load(tmp_path / "out.npz") as saved:
        out, lse = saved["out"].view(ml_dtypes.bfloat16).astype(np.float64), saved["lse"]
    item, _ = built("fa3", "head_dim=64", "mask=causal")
    want, want_lse = reference(item.attention, q, k, v)
    assert not out[:, :130].any() and np.isneginf(lse[:, :, :130]).all()
    np.testing.assert_allclose(out, want, atol=0.02)
    np.testing.assert_allclose(lse[:, :, 130:], want_lse[:, :, 130:], atol=1e-3)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", ["fa2", "fa3"])
def test_jitter_changes_no_bit(name: str, tmp_path: Path) -> None:
    (item,) = common.select([name], ["head_dim=64"])
    b = common.built(item, debug=True)
    outcome = check_gpu(
        [item_of(b, jitter_problems(item.attention, item.schedule))], [b], seed=2, repeat=10, jitter=True, bundles=tmp_path
    )
    assert all(r.verdict.passed and r.runs == 10 for r in outcome.results), [r.verdict.reason for r in outcome.results]


# kernels broken on purpose ------------------------------------------------------------------------------------------------


def broken(statement: str) -> Built:
    """fa2 with a statement at the start of its kernel."""
    (item,) = common.select(["fa2"], ["head_dim=64"])
    p = plan(item.attention, item.schedule)
    source = emit(p, "broken")
    head, shared, rest = source.text.partition("  extern __shared__")
    assert shared, "the kernel no longer begins with its shared memory"
    return build(p, replace(source, text=f"{head}  {statement}\n{shared}{rest}"), enforce=False)


def failing(b: Built, tmp_path: Path, **options: Any) -> tuple[LaunchError, dict[str, Any], float]:
    start = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        check_gpu([item_of(b, SMALL)], [b], bundles=tmp_path / "repro", **options)
    seconds = time.monotonic() - start
    (folder,) = (tmp_path / "repro").iterdir()
    assert str(folder) in str(caught.value)
    return caught.value, read_bundle(folder), seconds


@pytest.mark.usefixtures("compiler")
def test_a_hang_costs_seconds_and_the_gpu_lives(tmp_path: Path) -> None:
    hanging = broken("while (clock64() != 0) __nanosleep(1000);")
    error, facts, seconds = failing(hanging, tmp_path, timeout=3)
    assert "no sign of life for 3 s" in str(error) and facts["failure"] == "hang"
    assert seconds < 60
    _, good = built("fa2", "head_dim=64")
    outcome = check_gpu([item_of(good, SMALL)], [good], bundles=tmp_path)
    assert all(r.verdict.passed for r in outcome.results)
    (folder,) = (tmp_path / "repro").iterdir()
    assert run(["repro", str(folder), "--timeout", "3"]) == 1


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("statement", "code"), [("__trap();", "CUDA_ERROR_"), ("*(volatile int*)64 = 1;", "CUDA_ERROR_ILLEGAL_ADDRESS")]
)
def test_a_fault_is_named(statement: str, code: str, tmp_path: Path) -> None:
    error, facts, _ = failing(broken(statement), tmp_path)
    assert code in str(error) and "launch of broken on 2,4,2,129,200" in str(error)
    assert facts["failure"] == "fault" and facts["case"]["problem"]["sq"] == 129


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("return;", "elements of out are NaN"),
        ("if (threadIdx.x == 0) p.lse[-1] = 0;", "bytes beside lse were overwritten"),
    ],
)
def test_a_wrong_kernel_fails_its_cases(statement: str, reason: str, tmp_path: Path) -> None:
    b = broken(statement)
    outcome = check_gpu([item_of(b, SMALL[:1])], [b], bundles=tmp_path)
    (result,) = outcome.results
    assert not result.verdict.passed and reason in result.verdict.reason
    assert read_bundle(outcome.bundles["broken"])["reason"] == result.verdict.reason


def test_the_parent_makes_no_context(tmp_path: Path) -> None:
    """All GPU work is the worker's: a kernel that ends its context must not end ours."""
    seen: list[int] = []
    on_result: Callable[[Any], None] = lambda _: seen.append(driver.current_context())  # noqa: E731
    before = driver.current_context()
    _, b = built("fa2", "head_dim=64")
    check_gpu([item_of(b, SMALL[:1])], [b], bundles=tmp_path, on_result=on_result)
    assert seen == [before]
