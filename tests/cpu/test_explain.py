"""explain: the numbers it shows are the plan's."""

from __future__ import annotations

import itertools
import json

import pytest

from fagen.explore.explain import explain
from fagen.library import load
from fagen.plan import plan
from fagen.report import CompileReport, KernelReport


@pytest.mark.parametrize("name", ["fa2", "fa3"])
def test_an_explanation_is_plain_json_with_the_documented_keys(name: str) -> None:
    p = plan(*load(name))
    answer = explain(p)
    assert json.loads(json.dumps(answer)) == answer
    assert set(answer) == {
        *("plan", "attention", "schedule", "kernels", "loop_nest", "shared_memory", "named_barriers", "registers"),
    }
    assert answer["plan"] == p.id and answer["schedule"] == p.schedule.to_dict()
    assert answer["loop_nest"][0].startswith(p.kernels[0].roles[0].name)


@pytest.mark.parametrize("name", ["fa2", "fa3"])
def test_the_memory_map_is_complete_and_without_overlap(name: str) -> None:
    p = plan(*load(name))
    (kernel,) = p.kernels
    lines = explain(p)["shared_memory"]
    assert [m["name"] for m in lines if m["kind"] == "tile"] and len(lines) == len(kernel.smem) + len(kernel.mbars)
    for here, there in itertools.pairwise(lines):
        assert here["offset"] + here["bytes"] <= there["offset"]
    assert lines[-1]["offset"] + lines[-1]["bytes"] <= kernel.smem_bytes <= p.target.smem_bytes


def test_registers_of_roles() -> None:
    p = plan(*load("fa3", head_dim=128, mask="full", parallelism="persistent_static"))
    report = CompileReport(
        "sm_90a",
        "NVRTC",
        0.5,
        (KernelReport("attention", 168, {"producer": 11, "consumer": 220}, 0, 0, 0, 0, (), None, {}, None, ()),),
        (),
    )
    producer, consumer = explain(p, report)["registers"]
    assert (producer["role"], producer["threads"], producer["planned"], producer["compiled"]) == ("producer", 128, 24, 11)
    assert (consumer["role"], consumer["threads"], consumer["planned"], consumer["compiled"]) == ("consumer", 256, 240, 220)
    assert producer["setmaxnreg"] and consumer["setmaxnreg"]
    assert consumer["tiles"]["O"] == 64 * 128 // 128 and producer["tiles"] == {}
    assert consumer["tiles"]["S"] == p.schedule.tile_kv // 2
    assert explain(p)["registers"][0]["compiled"] is None


def test_a_uniform_kernel_has_what_the_launch_leaves_a_thread() -> None:
    (warps,) = explain(plan(*load("fa2")))["registers"]
    assert not warps["setmaxnreg"] and warps["planned"] == 255 and warps["threads"] == 256
