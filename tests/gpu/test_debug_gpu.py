"""Debug builds on a device: a kernel that is broken on purpose traps and names what hung; delays do not change a right one's output.

A trap ends the CUDA context of its process, so every broken kernel runs in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np
import pytest

import fagen
from fagen import debug
from fagen.compile import build
from fagen.emit import emit
from fagen.launch import Kernel
from fagen.plan import Plan
from fagen.plan.build import assemble
from fagen.plan.steps import Body, bodies, walk

pytestmark = pytest.mark.gpu

SHAPE = (1, 1024, 2, 64)
START_SECONDS = 20  # of a process: imports, compilation, the CUDA context
HANGS = [
    # The producer never gets a slot of K back, so the consumers run out of K.
    ("consumer.tiles.tile.steady.arrive_k_empty", ("producer", "wait_k_empty", "k_empty")),
    # No consumer's turn ever comes: they hang in bar.sync, which has no limit, and the producer names them.
    ("consumer.start.n_arrive_order", ("producer waits at", "consumer 0 at consumer.tiles.tile.sync_order (order[0])")),
    # Nobody gives Q back, so there is no second tile.
    ("consumer.tiles.tile.steady.last.arrive_q_empty", ("producer", "wait_q_empty", "q_empty")),
]
"""What is left out of fa3, and what the record then says."""


def without(body: Body, step_id: str) -> Body:
    kept = []
    for step in body:
        if step.id != step_id:
            inner = {field: without(b, step_id) for field, b in bodies(step)}
            kept.append(replace(step, **inner) if inner else step)  # type: ignore[arg-type]
    return tuple(kept)


def broken(step_id: str) -> Plan:
    """A debug plan of fa3 without one of its steps, which no proof has seen."""
    plan = assemble(*fagen.load("fa3", head_dim=64, parallelism="persistent_static"), debug=True)
    (kernel,) = plan.kernels
    assert any(step_id == s.id for r in kernel.roles for s in walk(r.body)), f"no step {step_id}"
    roles = tuple(replace(r, body=without(r.body, step_id)) for r in kernel.roles)
    return replace(plan, kernels=(replace(kernel, roles=roles),))


def kernel_of(plan: Plan) -> Kernel:
    source = emit(plan)
    built = build(plan, source, allow_spill_bytes=debug.SPILL_BYTES, use_cache=False)
    return Kernel(plan, source.text, built.cubin, built.report)


def inputs(seqlen_q: int | None = None, seqlen_k: int | None = None) -> tuple[np.ndarray, ...]:
    """q, k, v of SHAPE, or with other lengths."""
    random = np.random.default_rng(1)
    batch, seq, heads, dim = SHAPE
    lengths = (seqlen_q or seq, seqlen_k or seq, seqlen_k or seq)
    return tuple(random.standard_normal((batch, n, heads, dim)).astype(ml_dtypes.bfloat16) for n in lengths)


def run_broken(step_id: str) -> None:
    """In a process of its own: prints how long the call took, the error, and the record."""
    plan = broken(step_id)
    kernel = kernel_of(plan)
    start = time.monotonic()
    try:
        kernel(*inputs())
    except fagen.LaunchError as e:
        print(f"{time.monotonic() - start:.1f} s: {e}")
    else:
        print("no error")
    print(debug.decode_record(kernel.debug_record(), plan), flush=True)


@pytest.mark.parametrize(("dropped", "expected"), HANGS)
def test_a_hang_ends_and_is_named(device, dropped, expected):
    if dropped.endswith("q_empty"):  # needs a CTA with two tiles
        command = f"test_debug_gpu.SHAPE = (64, 1024, 2, 64); test_debug_gpu.run_broken({dropped!r})"
    else:
        command = f"test_debug_gpu.run_broken({dropped!r})"
    folder = __file__.rpartition("/")[0]
    code = f"import sys; sys.path.insert(0, {folder!r}); import test_debug_gpu; {command}"
    limit = debug.WAIT_LIMIT_NS / 1e9 + 3
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=limit + START_SECONDS)
    assert done.returncode == 0, done.stderr
    outcome, record = done.stdout.strip().splitlines()[-2:]
    assert " s: " in outcome, done.stdout
    assert float(outcome.split(" s: ")[0]) < limit
    for part in expected:
        assert part in record, record
    assert "CTA" in record


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("fa3", {}),
        ("fa3", {"mask": "causal", "parallelism": "persistent_dynamic"}),
        ("fa2", {}),
    ],
)
def test_delays_change_no_bit(device, name, changes):
    plan = fagen.plan(*fagen.load(name, head_dim=64, **changes), debug=True)
    kernel = kernel_of(plan)
    call = partial(kernel, *inputs())
    out, lse = (np.array(x) for x in call())
    assert np.isfinite(out.astype(np.float32)).all() and np.isfinite(lse).all()
    for seed in range(1, 11):
        kernel.seed = seed
        again, lse_again = call()
        assert np.array_equal(out.view(np.uint16), np.asarray(again).view(np.uint16)), f"seed {seed}"
        assert np.array_equal(lse, lse_again), f"seed {seed}"
    assert debug.decode_record(kernel.debug_record(), plan) is None


def test_delays_take_time(device):
    """The seed reaches the kernel. Over 512 key blocks of a tile, delays add milliseconds to less than one."""
    plan = fagen.plan(*fagen.load("fa3", head_dim=64), debug=True)
    kernel = kernel_of(plan)
    q, k, v = inputs(192, 65536)

    def seconds(seed: int) -> float:
        kernel.seed = seed
        kernel(q, k, v)
        times = []
        for _ in range(5):
            start = time.monotonic()
            kernel(q, k, v)
            times.append(time.monotonic() - start)
        return min(times)

    assert seconds(5) > seconds(0)
