"""explain: the numbers it shows are the plan's."""

from __future__ import annotations

import itertools
import json

import pytest

from fagen import InputError
from fagen.cli import run
from fagen.explore.answers import COVER, OVERLAP, TILES, WARPS
from fagen.explore.explain import explain
from fagen.library import load
from fagen.plan import Problem, plan
from fagen.report import CompileReport, KernelReport


@pytest.mark.parametrize("name", ["fa2", "fa3"])
def test_an_explanation_is_plain_json_with_the_documented_keys(name: str) -> None:
    p = plan(*load(name))
    answer = explain(p)
    assert json.loads(json.dumps(answer)) == answer
    assert set(answer) == {
        *("plan", "attention", "schedule", "kernels", "loop_nest", "shared_memory", "named_barriers", "registers", "answers"),
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


PROBLEM = Problem(1, 4096, 4096, 16, 16)


@pytest.mark.parametrize("name", ["fa2", "fa3", "fa3_fp8"])
def test_a_problem_adds_counts_times_and_what_binds(name: str) -> None:
    answer = explain(plan(*load(name, mask="causal")), problem=PROBLEM)
    assert json.loads(json.dumps(answer)) == answer
    assert answer["binds"] in answer["times_us"] and answer["bound_us"] == max(answer["times_us"].values())
    counts = answer["counts"]["attention"]
    assert counts["sm_read_bytes"]["all"] == sum(n for t, n in counts["sm_read_bytes"].items() if t != "all")
    assert counts["dram_read_bytes"]["all"] <= counts["sm_read_bytes"]["all"]
    assert answer["sentence"].endswith("µs.") and answer["device"]["sms"] == 132
    assert answer["problem"] == {"batch": 1, "sq": 4096, "sk": 4096, "hq": 16, "hkv": 16}


def test_the_compilers_registers_decide_how_many_ctas_fit() -> None:
    p = plan(*load("fa2"))
    report = CompileReport("sm_90", "NVRTC", 0.5, (KernelReport("attention", 128, None, 0, 0, 0, 0, (), None, {}, None, ()),), ())
    without, with_ = (explain(p, r, PROBLEM)["counts"]["attention"] for r in (None, report))
    assert (without["ctas_per_sm"], with_["ctas_per_sm"]) == (1, 2)


def said(name: str, question: str, **changes: object) -> str:
    return "\n".join(explain(plan(*load(name, **changes)))["answers"][question])


def test_what_stays_and_what_passes() -> None:
    text = said("fa3", TILES)
    assert "q lies in shared memory as 128 × 128 bf16 (1 slot, 32 KB), loaded once for a query tile." in text
    assert "k lies in shared memory as 176 × 128 bf16 (2 slots, 88 KB), a new one for every key block j." in text
    assert "O 64 × 128 fp32 in 64 registers a thread" in text
    assert "a new one for every query tile m" in said("fa2", TILES, parallelism="batch_heads")


def test_how_blocks_cover_the_problem() -> None:
    assert "each claims query tiles from a counter" in said("fa3", COVER)
    assert "takes the query tiles c, c + CTAs" in said("fa3", COVER, parallelism="persistent_static")
    fused = {"reference": "stale", "fuse_tiles": True, "tile_kv": 128}
    assert "each claims query tiles" in said("fa3", COVER, **fused)
    assert "takes the query tiles c" in said("fa3", COVER, **fused, parallelism="persistent_static")
    assert "each owns one query tile" in said("fa2", COVER)
    assert "batch * hq CTAs; each owns all query tiles of one head" in said("fa2", COVER, parallelism="batch_heads")
    text = "\n".join(explain(plan(*load("fa3")), problem=PROBLEM)["answers"][COVER])
    assert "Here: 512 tiles, 1 CTA an SM at a time (by shared memory); the busiest SM has 1.03 × the average work." in text


def test_how_warps_share_and_what_crosses() -> None:
    text = said("fa3_fp8", WARPS)
    assert "consumer: 2 × 4 warps; each owns 64 query rows" in text and "transposer: 3 warps; transposes V." in text
    assert "producer → transposer, completed by TMA: raw_full." in text and "named barriers" not in text
    assert "order: 2 named barriers" in said("fa3", WARPS)
    text = said("fa2", WARPS)
    assert "warps: 8 warps; each owns 16 query rows" in text and "CTA barriers: 2 in each round" in text and "→" not in text


def test_what_overlaps_what() -> None:
    own, turns = "while P·V of the same warpgroup is in flight", "ping-pong"
    for overlap, (has_own, has_turns) in {"both": (1, 1), "within": (1, 0), "pingpong": (0, 1), "none": (0, 0)}.items():
        text = said("fa3", OVERLAP, overlap=overlap)
        assert ((own in text), (turns in text)) == (has_own, has_turns), overlap
        assert "as many tiles ahead as there are slots: Q 1, K 2, V 2" in text
    assert "products are synchronous" in said("fa2", OVERLAP) and "cp.async copies of Q, K and V" in said("fa2", OVERLAP)
    stale = said("fa3", OVERLAP, reference="stale", tile_kv=128)
    assert own in stale


def test_the_command_with_a_shape(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "fa2", "--no-compile", "--shape", "1,16,16,1024,1024", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["binds"] in ("tensor", "parallelism")
    assert run(["explain", "fa2", "--no-compile", "--shape", "1,16,16,1024,1024"]) == 0
    text, said = capsys.readouterr()
    assert "without the compiler's registers an SM may hold more CTAs" in said
    assert TILES in text and "into SMs: k, MB" in text and "bind" in text.splitlines()[-1]
    assert run(["explain", "fa2", "--no-compile", "--shape", "1,16"]) == 2
    assert "--shape: '1,16' is not B,HQ,HKV,SQ,SK" in capsys.readouterr().err


def test_a_problem_that_cannot_be_launched() -> None:
    with pytest.raises(InputError, match="grid"):
        explain(plan(*load("fa2")), problem=Problem(0, 128, 128, 1, 1))
