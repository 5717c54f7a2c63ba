"""The model: counts agree with running the program step by step, bytes with what is known on paper, and what binds with what is measured."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace

import numpy as np
import pytest
from fp8_steps import PAPER_FP8

from fagen import Attention, InputError
from fagen.errors import InternalError
from fagen.explore.contexts import evaluate
from fagen.explore.machine import H200
from fagen.explore.quantities import COSTS, FREE, quantities
from fagen.explore.roofline import RESOURCES, Cost, contiguous, cost, occupancy
from fagen.explore.tally import tally
from fagen.library import load
from fagen.plan import Plan, Problem, assemble, plan
from fagen.plan import steps as step_kinds
from fagen.plan.expr import Const, ceildiv, maximum, minimum, sym
from fagen.plan.kernel import KernelPlan, scalar_env
from fagen.plan.steps import Body, Break, ClaimTile, Elected, Forever, GetTile, If, Let, Loop, Role, Set, Step, Var, Vote

LONG = Problem(1, 16384, 16384, 16, 16)


def planned(name: str, **changes: object) -> Plan:
    return assemble(*load(name, **changes))


def scalars_of(p: Plan, problem: Problem, sms: int) -> list[tuple[KernelPlan, dict[str, int]]]:
    launch = p.bind(problem, contiguous(p.attention, problem, p.schedule.v_transposed), sms)
    sizes = {f: getattr(problem, f) for f in ("batch", "sq", "sk", "hq", "hkv")}
    return [(k, sizes | scalar_env(k, bound)) for k, bound in zip(p.kernels, launch.kernels)]


# counts against a plain interpreter ---------------------------------------------------------------------------------------


class Left(Exception):
    """A Break."""


def interpret(kernel: KernelPlan, scalars: dict[str, int]) -> dict[tuple[str, ...], int]:
    """Runs every iteration of every loop of every CTA, with integers. Claimed tiles come as they do where all take alike."""
    total: dict[tuple[str, ...], int] = {}
    for role in kernel.roles:
        for w in range(role.count):
            for cta in range(scalars["n_ctas"]):
                _run(kernel, role, role.body, {**scalars, "cta": cta, "w": w}, total, itertools.count())
    return {k: n for k, n in total.items() if n}


def _run(kernel: KernelPlan, role: Role, body: Body, env: dict[str, int], total: dict, tiles: itertools.count) -> None:
    for step in body:
        if isinstance(step, (Let, Var, Set)):
            env[step.var] = step.value.eval(env)
        elif isinstance(step, (GetTile, ClaimTile)):  # the first tile is a CTA's own number, so the first claim is the second
            env[step.var] = env["cta"] + (next(tiles) + isinstance(step, ClaimTile)) * env["n_ctas"]
        elif isinstance(step, Loop):
            by = step.step if isinstance(step.step, int) else step.step.eval(env)
            first, last = step.first.eval(env), step.last.eval(env)
            for i in range(first, last + (1 if by > 0 else -1), by):
                env[step.var] = i
                _run(kernel, role, step.body, env, total, tiles)
        elif isinstance(step, Forever):
            try:
                while True:
                    _run(kernel, role, step.body, env, total, tiles)
            except Left:
                pass
        elif isinstance(step, Break):
            if step.cond.eval(env):
                raise Left
        elif isinstance(step, If):
            _run(kernel, role, step.then if step.cond.eval(env) else step.orelse, env, total, tiles)
        elif isinstance(step, Vote):
            _run(kernel, role, step.orelse, env, total, tiles)
        elif isinstance(step, Elected):
            if env["w"] == 0:
                _run(kernel, role, step.body, env, total, itertools.count())  # its claims reach it through the ring
        else:
            for q in quantities(kernel, role, step):
                if not q.shared or env["w"] == 0:
                    total[q.key] = total.get(q.key, 0) + q.amount.eval(env)


PLANS = {
    "fa2": ("fa2", {}),
    "fa2 causal": ("fa2", {"mask": "causal"}),
    "fa2 batch_heads": ("fa2", {"mask": "causal", "parallelism": "batch_heads"}),
    "fa3": ("fa3", {}),
    "fa3 causal": ("fa3", {"mask": "causal"}),
    "fa3 static": ("fa3", {"parallelism": "persistent_static", "mask": "causal"}),
    "fa3 uniform": (
        "fa3",
        {"roles": "uniform", "registers": None, "overlap": "within", "parallelism": "persistent_dynamic", "tile_kv": 64},
    ),
    "fa3 stale": ("fa3", {"reference": "stale", "tile_kv": 128}),
    "fa3 fused": ("fa3", {"reference": "stale", "fuse_tiles": True, "tile_kv": 128}),
    "fa3 fused causal": ("fa3", {"reference": "stale", "fuse_tiles": True, "tile_kv": 64, "mask": "causal"}),
    "fa3 fused static": (
        "fa3",
        {"reference": "stale", "fuse_tiles": True, "tile_kv": 64, "mask": "causal", "parallelism": "persistent_static"},
    ),
    "fa3 hd64": ("fa3", {"head_dim": 64}),
    "fa3_fp8": ("fa3_fp8", {"mask": "causal"}),
    "FP8 with V transposed": (PAPER_FP8, {"v_transposed": True}),
}
PROBLEMS = (Problem(2, 300, 300, 4, 2), Problem(1, 100, 1000, 2, 1), Problem(1, 500, 130, 2, 2), Problem(3, 128, 0, 1, 1))


LADDER = {
    "standard": ("standard", {}),
    "standard two_pass causal": ("standard", {"softmax": "two_pass", "mask": "causal"}),
    "fa1": ("fa1", {}),
    "fa1 causal": ("fa1", {"mask": "causal"}),
    "fa1 asynchronous": ("fa1", {"movement": "cp_async", "parallelism": "query_tiles", "mask": "causal"}),
}
"""Kernels that go through memory."""


def older(name: str, **changes: object) -> Plan:
    """A plan of the ladder's first rungs; skips where they are not built in."""
    try:
        return planned(name, **changes)
    except InputError as e:
        pytest.skip(f"not built in: {e}")


@pytest.mark.parametrize("name", LADDER)
def test_counts_through_memory_are_those_of_running_the_program(name: str) -> None:
    schedule, changes = LADDER[name]
    p = older(schedule, **changes)
    for problem in PROBLEMS:
        for kernel, scalars in scalars_of(p, problem, sms=3):
            found = {k: n for k, n in tally(kernel, scalars).total.items() if n}
            assert found == interpret(kernel, scalars), (problem, kernel.name)


@pytest.mark.parametrize("name", PLANS)
def test_counts_are_those_of_running_the_program(name: str) -> None:
    schedule, changes = PLANS[name]
    p = planned(schedule, **changes)
    for problem in PROBLEMS:
        for kernel, scalars in scalars_of(p, problem, sms=3):
            found = {k: n for k, n in tally(kernel, scalars).total.items() if n}
            assert found == interpret(kernel, scalars), problem


def test_units_add_up_and_are_ctas_or_claimed_tiles() -> None:
    problem = Problem(2, 300, 300, 4, 2)
    fused = {"reference": "stale", "fuse_tiles": True, "tile_kv": 64}
    static = {"parallelism": "persistent_static"}
    for name, changes, claimed, units in (
        ("fa2", {}, False, 24),
        ("fa3", {}, True, 24),
        ("fa3", static, False, 5),
        ("fa3", fused, True, 24),
        ("fa3", fused | static, False, 5),
    ):
        p = planned(name, mask="causal", **changes)
        ((kernel, scalars),) = scalars_of(p, problem, sms=5)
        assert cost(p, problem).kernels[0].units == (units if claimed or name == "fa2" else 24)
        work = tally(kernel, scalars)
        assert work.claimed is claimed and {len(n) for n in work.units.values()} == {units}
        assert {k: int(n.sum()) for k, n in work.units.items()} == work.total


def test_fused_tiles_cost_what_others_do() -> None:
    """The same products, bytes and balance."""
    fused, plain = (cost(planned("fa3", reference="stale", tile_kv=128, fuse_tiles=x), LONG) for x in (True, False))
    assert fused.flops == plain.flops and fused.sm_bytes == plain.sm_bytes and fused.dram_bytes == plain.dram_bytes
    assert fused.kernels[0].busiest == pytest.approx(plain.kernels[0].busiest, rel=0.02)


def test_every_kind_of_step_has_one_entry() -> None:
    containers = {"Loop", "Forever", "If", "Elected", "Vote"}
    kinds = {k.__name__ for k in vars(step_kinds).values() if isinstance(k, type) and issubclass(k, Step) and k is not Step}
    assert kinds <= COSTS.keys() | FREE | containers
    assert not COSTS.keys() & FREE


def test_an_unknown_kind_is_a_fault_of_ours_that_names_it() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Teleport(Step):
        pass

    (kernel,) = planned("fa2").kernels
    role = replace(kernel.roles[0], body=(*kernel.roles[0].body, Teleport(id="warps.teleport")))
    with pytest.raises(InternalError, match=r"warps\.teleport: nobody has said what a Teleport costs"):
        tally(replace(kernel, roles=(role,)), {"n_ctas": 1})


def test_expressions_on_arrays_are_those_on_integers() -> None:
    x, y = sym("x"), sym("y")
    expressions = [
        ceildiv(x, 7),
        maximum(x - y, 0) // 3,
        minimum(x, y) % 5,
        (x < y) * x + (x >= y),
        x ^ (y & 6) | 1,
        Const(4) + x - y,
    ]
    xs, ys = np.arange(40), np.arange(40)[::-1].copy()
    for e in expressions:
        assert evaluate(e, {"x": xs, "y": ys}).tolist() == [e.eval({"x": int(a), "y": int(b)}) for a, b in zip(xs, ys)]
    with pytest.raises(InternalError, match="non-negative"):
        evaluate((x - 5) // 3, {"x": xs})
    with pytest.raises(InternalError, match="no value for symbol 'z'"):
        evaluate(sym("z"), {"x": xs})


# counts on paper ----------------------------------------------------------------------------------------------------------


def test_counts_of_a_full_problem_on_paper() -> None:
    p, problem = planned("fa3", tile_kv=128), Problem(2, 1024, 2048, 8, 4)
    (k,) = cost(p, problem).kernels
    pairs = 2 * 8 * 1024 * 2048
    assert k.flops == {"wgmma bf16": 4 * pairs * 128}
    assert k.instructions == {"HGMMA": 2 * 8 * 8 * 16 * 2 * (8 + 8)}, (
        "heads · tiles · blocks · warpgroups · k-steps of both products"
    )
    assert k.exponentials == pairs + (pairs // 128 - 2 * 8 * 1024) * 4, (
        "and alpha in four lanes of every row and block but the first"
    )
    tiles = 2 * 8 * 1024 // 128
    assert k.sm_read == {"q": 2 * 8 * 1024 * 256, "k": tiles * 2048 * 256, "v": tiles * 2048 * 256}
    assert k.sm_written == {"out": 2 * 8 * 1024 * 256, "lse": 2 * 8 * 1024 * 4}
    assert k.dram_read == {"q": 2 * 8 * 1024 * 256, "k": 2 * 4 * 2048 * 256, "v": 2 * 4 * 2048 * 256}, "K and V fit L2"
    assert k.dram_written == k.sm_written


def test_bytes_into_the_sms_fall_with_the_tile() -> None:
    """Θ(N²·d²/M): twice the query rows in shared memory halve what is read of K and V."""
    small, large = (
        cost(planned("fa3", tile_q=64 * c, consumers=c, tile_kv=64, overlap="within"), LONG).kernels[0].sm_read["k"] for c in (1, 2)
    )
    assert small == 2 * large
    quarter = cost(planned("fa3", tile_kv=64), Problem(1, 8192, 8192, 16, 16)).kernels[0].sm_read["k"]
    assert 4 * quarter == large


def test_k_and_v_that_overflow_l2_are_read_again() -> None:
    p = planned("fa3", parallelism="query_tiles")
    fits, not_ = (cost(p, Problem(1, n, n, 1, 1)).kernels[0] for n in (16384, 1 << 18))
    assert fits.dram_read["k"] == 16384 * 256
    once, waves = (1 << 18) * 256, (1 << 18) / 128 / 132
    assert once * 2 < not_.dram_read["k"] <= once * waves, "once a wave: its CTAs go in step"
    roomy = replace(H200, l2_bytes=1 << 30)
    assert cost(p, Problem(1, 1 << 18, 1 << 18, 1, 1), roomy).kernels[0].dram_read["k"] == once


def test_ctas_that_walk_the_query_tiles_of_a_head_come_back_to_its_keys() -> None:
    problem = Problem(16, 4096, 4096, 16, 16)
    one, many = (cost(planned("fa2", parallelism=x), problem).kernels[0] for x in ("batch_heads", "query_tiles"))
    assert one.sm_read == many.sm_read
    assert many.dram_read["k"] == 256 * 4096 * 256 < one.dram_read["k"] < one.sm_read["k"], "132 heads side by side overflow L2"
    small = cost(planned("fa2", parallelism="batch_heads"), Problem(1, 512, 512, 16, 16)).kernels[0]
    assert small.dram_read["k"] == 16 * 512 * 256


# what binds ---------------------------------------------------------------------------------------------------------------


def bound(name: str, problem: Problem = LONG, **changes: object) -> Cost:
    return cost(planned(name, **changes), problem)


def test_fa3_at_head_dim_128_is_bound_by_the_tensor_cores() -> None:
    for mask in ("full", "causal"):
        found = bound("fa3", mask=mask)
        assert found.binds == "tensor" and found.times_us["exp"] < 0.6 * found.times_us["tensor"]
    whole = bound("fa3", tile_kv=128)
    assert whole.times_us["tensor"] == pytest.approx(4 * 16384**2 * 128 * 16 / 989.4e12 * 1e6, rel=1e-3)


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_fa3_at_head_dim_64_is_bound_by_both_units_alike(mask: str) -> None:
    found = bound("fa3", head_dim=64, mask=mask)
    assert found.binds in ("exp", "tensor")
    assert found.times_us["exp"] == pytest.approx(found.times_us["tensor"], rel=0.05)


def test_fp8_at_head_dim_128_is_bound_by_both_units_alike() -> None:
    found = bound("fa3_fp8")
    assert found.times_us["exp"] == pytest.approx(found.times_us["tensor"], rel=0.05)
    assert found.times_us["tensor"] == pytest.approx(bound("fa3").times_us["tensor"] / 2, rel=0.01)


def test_a_cta_a_head_binds_parallelism_where_heads_are_few() -> None:
    few = bound("fa2", parallelism="batch_heads")
    assert few.binds == "parallelism" and few.kernels[0].busiest == pytest.approx(132 / 16)
    assert few.bound_us == pytest.approx(few.times_us["tensor"] * 132 / 16)
    assert bound("fa2", Problem(33, 1024, 1024, 16, 16), parallelism="batch_heads").binds == "tensor", "four waves exactly"
    assert bound("fa2", Problem(1, 1024, 1024, 17, 17)).binds == "parallelism", "136 CTAs on 132 SMs: a second wave of four"


def test_short_problems_are_bound_by_latency_and_bytes_by_memory() -> None:
    assert bound("fa3", Problem(1, 128, 128, 1, 1)).binds == "latency"
    many = bound("fa3", Problem(4096, 128, 128, 16, 16))
    assert many.binds == "hbm"
    nbytes = 4096 * 16 * 128 * (4 * 256 + 4)
    assert many.dram_bytes == nbytes and many.times_us["hbm"] == pytest.approx(nbytes / H200.hbm_bytes_per_second * 1e6)


@pytest.mark.parametrize("schedule", ["standard", "fa1"])
def test_the_older_generations(schedule: str) -> None:
    """standard: S and P through memory. fa1: 16 CTAs for 16 heads."""
    found = cost(older(schedule), LONG)
    assert found.binds == {"standard": "hbm", "fa1": "parallelism"}[schedule]
    if schedule == "standard":
        s = 16 * 16384**2
        assert [k.name for k in found.kernels] == ["qk", "softmax", "pv"]
        assert (
            found.kernels[0].dram_written["S"] == 4 * s
            and found.kernels[1].dram_written["P"] == 2 * s == found.kernels[2].dram_read["P"]
        )
        assert found.kernels[1].sm_read["S"] == 3 * 4 * s > found.kernels[1].dram_read["S"] >= 4 * s


def test_times_are_lower_bounds_and_what_binds_is_one_of_them() -> None:
    for name, problem in itertools.product(("fa2", "fa3", "fa3_fp8"), PROBLEMS[:3]):
        found = bound(name, problem)
        assert tuple(found.times_us) == RESOURCES and found.binds in RESOURCES
        assert found.bound_us == max(found.times_us.values())
        assert found.times_us["parallelism"] >= max(found.times_us["tensor"], found.times_us["exp"]) * (1 - 1e-9)


def test_sixteen_thousand_causal_tokens_take_under_half_a_second() -> None:
    for name in ("fa2", "fa3", "fa3_fp8"):
        p = plan(*load(name, mask="causal"))
        began = time.perf_counter()
        cost(p, LONG)
        assert time.perf_counter() - began < 0.5


def test_a_large_grid_is_summed_in_parts() -> None:
    p = planned("fa2", mask="causal")
    small, large = (cost(p, Problem(batch, 128, 128, 16, 16)).kernels[0] for batch in (1, 20000))
    assert large.units == 320000 and large.flops["mma_sync bf16"] == 20000 * small.flops["mma_sync bf16"]


def test_occupancy() -> None:
    (fa2,), (fa3,) = planned("fa2").kernels, planned("fa3").kernels
    assert occupancy(fa2, H200) == (1, "registers") and occupancy(fa2, H200, registers=128) == (2, "shared memory")
    assert occupancy(fa3, H200, registers=168) == (1, "shared memory")


def test_a_problem_that_cannot_be_launched() -> None:
    with pytest.raises(InputError, match="not a multiple"):
        bound("fa2", Problem(1, 128, 128, 16, 3))


def test_attention_values_do_not_matter_for_the_counts() -> None:
    a, s = load("fa2")
    problem = Problem(1, 256, 256, 2, 2)
    assert cost(assemble(a, s), problem).flops == cost(assemble(Attention(head_dim=128, dtype="fp16", scale=0.5), s), problem).flops
