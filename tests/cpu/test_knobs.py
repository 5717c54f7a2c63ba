"""The knob walk: every field of both values is honoured or rejected, never ignored.

For each field: a change (with the fields it is tied to) after which the program and the comment-free code are others; and for each value it
can take, a legal schedule that takes it, or its place in the list of what no kernel honours yet.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from fp8_steps import PAPER_FP8

import fagen
from fagen import Attention, Schedule, ScheduleError
from fagen.compile import compile_cubin
from fagen.emit import emit
from fagen.plan import rules

# What is rejected with code not-yet. A kernel that honours one of these takes it out here as well as in the rules.
NOT_YET: dict[str, tuple[object, ...]] = {
    "mask": ("window",),
    "sink": (True,),
    "parallelism": ("kv_splits",),
    "p_operand": ("shared",),
}
NOT_YET_SET: dict[str, tuple[object, ...]] = {
    "window": ((128, 0), (0, 0)),
    "softcap": (30.0, 0.0),
}
"""Fields that must be None, with values to try."""

Pair = tuple[Attention, Schedule]
Changes = dict[str, Any]

FA2, FA3 = tuple(fagen.load("fa2", head_dim=64)), tuple(fagen.load("fa3", head_dim=64))
FA1, STANDARD = tuple(fagen.load("fa1", head_dim=64)), tuple(fagen.load("standard", head_dim=64))
FP8: Pair = tuple(fagen.load(PAPER_FP8, head_dim=64))
QUANTISED: Pair = tuple(fagen.load(PAPER_FP8, head_dim=64, dtype="bf16", precision="e4m3"))
"""16-bit tensors that the plan quantises."""
FA3_2: Pair = (FA3[0], FA3[1].replace(tile_q=128, consumers=2, tile_kv=64))
"""Two consumers at head_dim 64."""
UNIFORM: Changes = {"roles": "uniform", "overlap": "none", "tile_kv": 64}

SPLIT: dict[str, Changes] = {"split_q": {"tile_q": 64, "tile_kv": 64, "warps": 4}, "split_kv": {}}
"""Tiles that go with the partition, from fa1."""
STALE: Changes = {"reference": "stale", "tile_kv": 64}
HEAD: Changes = {"scale_granularity": "head"}
"""What an e4m3 schedule must say."""


def consumers(n: int) -> Changes:
    return {"consumers": n, "tile_q": 64 * n, "tile_kv": 32, "overlap": "both" if n > 1 else "within"}


def warps(n: int) -> Changes:
    return {"warps": n, "tile_q": 16 * n, "tile_kv": 64}


WGMMA: Changes = {
    "arch": "sm_90a",
    "mma": "wgmma",
    "movement": "tma",
    "warps": None,
    "consumers": 2,
    "tile_q": 128,
    "tile_kv": 64,
    "stages": 1,
    "overlap": "none",
    "roles": "uniform",
}
"""From an mma_sync schedule to a wgmma one: what is tied together."""

# field: value, the base it is tried on, the other fields it is tied to. Every value a field can take stands here or in NOT_YET.
ACCEPTED: dict[str, list[tuple[object, Pair, Changes]]] = {
    "head_dim": [(d, tuple(fagen.load(n, head_dim=d)), {}) for n in ("fa2", "fa3", PAPER_FP8) for d in (64, 128, 256)],
    "head_dim_v": [(None, FA3, {}), (64, FA3, {}), (128, tuple(fagen.load("fa3")), {})],
    "dtype": [*((d, base, {}) for d in ("bf16", "fp16") for base in (FA2, FA3)), ("e4m3", FP8, {}), ("e4m3", FA3, HEAD), ("int8", FP8, {}), ("int8", FA3, HEAD), ("int8", FP8, {"v_transposed": True, **UNIFORM, "overlap": "within"})],
    "v_dtype": [(None, FA3, {}), *((v, FP8, {"dtype": "int8"}) for v in (None, "e4m3")), *((v, FP8, {"dtype": "int8", "tile_kv": 128, "scale_granularity": g}) for v in ("bf16", "fp16") for g in ("tensor", "head", "block")), ("bf16", FP8, {"dtype": "int8", **UNIFORM, "overlap": "within"}), ("fp16", FP8, {"dtype": "int8", **STALE, "mask": "causal", "skip_masked": True})],
    "out_dtype": [(d, base, {}) for d in (None, "bf16", "fp16") for base in (FA2, FA3, FP8)],
    "mask": [(m, base, {}) for m in ("full", "causal") for base in (FA2, FA3, FP8)],
    "scale": [(x, base, {}) for x in (None, 1, 0.5, 1e-30, 256) for base in (FA2, FA3, FP8)],
    "window": [(None, FA3, {})],
    "softcap": [(None, FA3, {})],
    "sink": [(False, FA3, {})],
    "arch": [("sm_80", FA2, {}), ("sm_90", FA2, {}), ("sm_90a", FA3, {})],
    "tile_q": [*((q, FA2, {"warps": w, "tile_kv": 32}) for q in (16, 32, 48, 64, 128, 192, 256) for w in (1, 2, 4, 8) if q % (16 * w) == 0 and q // w <= 32), *((64 * n, FA3, consumers(n)) for n in (1, 2, 3, 4))],
    "tile_kv": [*((kv, FA2, {"warps": 4, "tile_q": 64}) for kv in (16, 48, 80, 128)), *((kv, FA3_2, {"stages": 1}) for kv in range(16, 193, 16)), *((kv, FP8, {"stages": 1}) for kv in range(32, 161, 32))],
    "loop_order": [*((o, FA1, {"partition": p, **SPLIT[p]}) for o in ("q_outer", "kv_outer") for p in ("split_q", "split_kv")), ("q_outer", FA2, {})],
    "parallelism": [("batch_heads", FA2, {}), ("query_tiles", FA2, {}), *((p, FA3, {}) for p in ("query_tiles", "persistent_static", "persistent_dynamic"))],
    "partition": [("split_q", FA2, {}), *((p, FA1, SPLIT[p]) for p in ("split_q", "split_kv"))],
    "roles": [("uniform", FA3, UNIFORM), ("producer", FA3, {})],
    "warps": [(None, FA3, {}), *((n, FA2, warps(n)) for n in (1, 2, 4, 8))],
    "consumers": [(None, FA2, {}), *((n, FA3, consumers(n)) for n in (1, 2, 3, 4))],
    "registers": [(None, FA3, {}), (None, FA3, UNIFORM), ((24, 152), FA3, {"tile_kv": 96}), ((40, 232), FA3_2, {}), ((24, 200), FA3_2, {})],
    "movement": [("cp_async", FA2, {}), ("ld_st", FA2, {"stages": 1}), ("cp_async", FA1, {}), ("ld_st", FA1, {}), ("tma", FA3, {})],
    "mma": [("mma_sync", FA2, {}), ("wgmma", FA2, WGMMA)],
    "q_operand": [(None, FA2, {}), (None, FA3, {}), *(("registers", base, {"tile_kv": 64, "overlap": o, **r}) for base in (FA3, FP8) for o in ("none", "within", "pingpong", "both") for r in ({}, {"parallelism": "query_tiles"})), *(("registers", base, {**STALE, "tile_kv": 64, "overlap": o, "fuse_tiles": f}) for base in (FA3, FP8) for o in ("within", "both") for f in (False, True)), ("registers", FA3, {**UNIFORM, "tile_kv": 64})],
    "p_operand": [("registers", FA2, {}), ("registers", FA3, {})],
    "stages": [(n, base, {"tile_kv": 64}) for n in (1, 2, 3, 4, (1, 2), (2, 1), (1, 4), (3, 2)) for base in (FA2, FA3, (FA3[0], FA3[1].replace(**UNIFORM)))],
    "stages_q": [(None, FA3, {}), (None, FA2, {}), (1, FA3, {}), (1, FA2, {}), *((2, base, {"tile_kv": 64, "parallelism": p}) for base in (FA3, FP8) for p in ("persistent_static", "persistent_dynamic"))],
    "overlap": [*((o, FA3, {}) for o in ("none", "within", "pingpong", "both")), *((o, FA3, {**UNIFORM, "overlap": o}) for o in ("none", "within")), ("none", FA2, {})],
    "fuse_tiles": [(False, FA3, {}), (False, FA2, {}), *((True, FA3, {**STALE, "overlap": o, "parallelism": p}) for o in ("within", "both") for p in ("persistent_static", "persistent_dynamic"))],
    "skip_masked": [(False, FA3, {}), (False, FA2, {}), *((True, FA3, {"mask": "causal", "tile_kv": 64, "overlap": o}) for o in ("none", "within", "pingpong", "both")), *((True, base, {**STALE, "mask": "causal", "tile_kv": 64}) for base in (FA3, FP8))],
    "softmax": [("fused", FA3, {}), ("fused", FA2, {}), ("three_pass", STANDARD, {}), ("two_pass", STANDARD, {})],
    "normalise": [("once", FA3, {}), *((n, base, {}) for n in ("once", "each_step") for base in (FA1, FA2))],
    "reference": [("running", FA3, {}), ("running", FA2, {}), *(("stale", base, {"overlap": o, "tile_kv": 64}) for base in (FA3, FP8) for o in ("within", "both"))],
    "precision": [(None, FA3, {}), (None, FP8, {}), *((p, QUANTISED, {"dtype": d, "tile_kv": 96}) for p in ("e4m3", "int8", "int8_qk") for d in ("bf16", "fp16"))],
    "scale_granularity": [(None, FA3, {}), (None, FA2, {}), *((g, FP8, {**r, "overlap": o}) for g in ("tensor", "head", "block") for o in ("within", "both") for r in ({}, STALE)), *((g, QUANTISED, {}) for g in ("tensor", "head", "block"))],
    "hadamard": [(False, FA3, {}), *((h, QUANTISED, {}) for h in (False, True))],
    "smooth_k": [(False, FA3, {}), *((s, QUANTISED, {"hadamard": h, "scale_granularity": g}) for s in (False, True) for h in (False, True) for g in ("head", "block"))],
    "v_transposed": [(False, FA3, {}), (False, FP8, {}), (True, FP8, {}), (True, FP8, {**UNIFORM, "overlap": "within"})],
    "promote_every": [(None, FA3, {}), *((n, FP8, {"tile_kv": 64, "overlap": o}) for n in (None, 1, 2, 3, 4096) for o in ("none", "within", "pingpong", "both")), (2, FP8, {**STALE, "overlap": "within"})],
}  # fmt: skip

# field: base, the field's value and what is tied to it, on the one side and on the other.
# Both sides are legal; the program and the code must differ. Fields with one legal value are in ONE_VALUE.
EFFECT: dict[str, list[tuple[Pair, Changes, Changes]]] = {
    "head_dim": [(FA2, {"head_dim": 64, "tile_kv": 64}, {"head_dim": 128, "tile_kv": 64}), (FA3, {"head_dim": 64, "tile_kv": 80}, {"head_dim": 128, "tile_kv": 80})],
    "dtype": [(FA2, {"dtype": "bf16"}, {"dtype": "fp16"}), (FA3, {"dtype": "bf16", "out_dtype": "fp16"}, {"dtype": "fp16"}), (FA3, {"dtype": "e4m3", **HEAD}, {"dtype": "bf16"}), (FP8, {}, {"dtype": "int8"})],
    "v_dtype": [(FP8, {"dtype": "int8", "tile_kv": 64, "v_dtype": a}, {"dtype": "int8", "tile_kv": 64, "v_dtype": b}) for a, b in ((None, "bf16"), ("bf16", "fp16"))],
    "out_dtype": [(FA2, {}, {"out_dtype": "fp16"}), (FA3, {"dtype": "fp16"}, {"dtype": "fp16", "out_dtype": "bf16"}), (FP8, {}, {"out_dtype": "fp16"})],
    "mask": [(FA2, {"mask": "full"}, {"mask": "causal"}), (FA3, {"mask": "full"}, {"mask": "causal"})],
    "scale": [(FA2, {}, {"scale": 0.25}), (FA3, {"scale": 0.25}, {"scale": 0.5}), (FP8, {}, {"scale": 0.5})],
    "arch": [(FA2, {"arch": "sm_90"}, WGMMA)],
    "tile_q": [(FA2, {"tile_q": 64, "warps": 4}, {"tile_q": 128, "warps": 4, "tile_kv": 64}), (FA2, {"tile_kv": 32}, {"tile_kv": 32, "tile_q": 256}), (FA3, consumers(2), consumers(3))],
    "tile_kv": [(FA2, {"tile_kv": 64}, {"tile_kv": 128}), (FA3, {"tile_kv": 64}, {"tile_kv": 80})],
    "parallelism": [
        *((base, {"parallelism": "batch_heads"}, {"parallelism": "query_tiles"}) for base in (FA1, FA2)),
        *((FA3, {"parallelism": a}, {"parallelism": b}) for a, b in (("query_tiles", "persistent_static"), ("persistent_static", "persistent_dynamic"))),
    ],
    "roles": [(FA3, UNIFORM, {**UNIFORM, "roles": "producer"})],
    "warps": [(FA2, {"tile_q": 128, "warps": 4, "tile_kv": 64}, {"tile_q": 128, "warps": 8, "tile_kv": 64})],
    "consumers": [(FA3, consumers(n), {**consumers(n + 1), "overlap": consumers(n)["overlap"]}) for n in (1, 2, 3)],
    "registers": [(FA3_2, {}, {"registers": (40, 232)}), (FA3_2, {"registers": (24, 200)}, {"registers": (24, 208)}), (FA3_2, {"registers": (24, 200)}, {"registers": (32, 200)})],
    "movement": [(FA2, {"movement": "cp_async"}, WGMMA), *((base, {"stages": 1, "movement": "ld_st"}, {"stages": 1, "movement": "cp_async"}) for base in (FA1, FA2))],
    "loop_order": [(FA1, {"loop_order": a, "partition": p, **SPLIT[p]}, {"loop_order": b, "partition": p, **SPLIT[p]}) for p in ("split_q", "split_kv") for a, b in (("q_outer", "kv_outer"),)],
    "partition": [(base, {"partition": "split_q", "tile_q": 32, "tile_kv": 64, "warps": 2}, {"partition": "split_kv", "tile_q": 32, "tile_kv": 64, "warps": 2}) for base in (FA1, FA2)],
    "softmax": [(STANDARD, {"softmax": "three_pass"}, {"softmax": "two_pass"}), (STANDARD, {}, {"softmax": "fused"})],
    "normalise": [(base, {"normalise": "once"}, {"normalise": "each_step"}) for base in (FA1, FA2)],
    "mma": [(FA2, {"mma": "mma_sync"}, WGMMA)],
    "stages": [(base, {"tile_kv": 64, "stages": a}, {"tile_kv": 64, "stages": b}) for base in (FA2, FA3) for a, b in ((1, 2), (2, 3), (3, 4), (2, (2, 1)), ((1, 2), (2, 1)))],
    "stages_q": [(base, {"tile_kv": 64}, {"tile_kv": 64, "stages_q": 2}) for base in (FA3, FP8)],
    "q_operand": [(base, {"tile_kv": 64}, {"tile_kv": 64, "q_operand": "registers"}) for base in (FA3, FP8)],
    "overlap": [(FA3, {"overlap": a}, {"overlap": b}) for a, b in (("none", "within"), ("within", "pingpong"), ("pingpong", "both"), ("none", "pingpong"), ("within", "both"))]
    + [(FA3, UNIFORM, {**UNIFORM, "overlap": "within"})],
    "fuse_tiles": [(FA3, STALE, {**STALE, "fuse_tiles": True})],
    "skip_masked": [(FA3, {"mask": "causal"}, {"mask": "causal", "skip_masked": True})],
    "reference": [(base, {"tile_kv": 64}, {"tile_kv": 64, "reference": "stale"}) for base in (FA3, FP8)],
    "v_transposed": [(FP8, {"v_transposed": False}, {"v_transposed": True})],
    "scale_granularity": [(FP8, {"scale_granularity": a}, {"scale_granularity": b}) for a, b in (("tensor", "head"), ("head", "block"), ("tensor", "block"))],
    "promote_every": [(FP8, {"tile_kv": 64, "promote_every": a}, {"tile_kv": 64, "promote_every": b}) for a, b in ((None, 1), (1, 2), (2, 3))],
    "precision": [(QUANTISED, {"precision": None, "scale_granularity": None, "tile_kv": 128}, {"tile_kv": 128}), (QUANTISED, {}, {"precision": "int8"}), (QUANTISED, {"precision": "int8", "tile_kv": 96}, {"precision": "int8_qk", "tile_kv": 96})],
    "hadamard": [(QUANTISED, {"hadamard": False}, {"hadamard": True})],
    "smooth_k": [(QUANTISED, {"hadamard": h}, {"hadamard": h, "smooth_k": True}) for h in (False, True)],
}  # fmt: skip

ONE_VALUE = {
    "head_dim_v": "None or head_dim itself",
    **dict.fromkeys(NOT_YET_SET, "None until it is honoured"),
    **dict.fromkeys(
        ("sink", "p_operand"),
        "the others are not yet honoured",
    ),
}  # fmt: skip
"""Fields with a single legal meaning today, and why."""

FIELDS = (*Attention.field_names(), *Schedule.field_names())


def change(base: Pair, changes: Changes) -> Pair:
    mine = {k: v for k, v in changes.items() if k in Attention.field_names()}
    return base[0].replace(**mine), base[1].replace(**{k: v for k, v in changes.items() if k not in mine})


def test_the_walk_meets_every_field() -> None:
    assert set(ACCEPTED) == set(FIELDS)
    assert set(EFFECT) | set(ONE_VALUE) == set(FIELDS) and not set(EFFECT) & set(ONE_VALUE)


def test_the_list_of_what_is_not_yet_honoured() -> None:
    """Held literally: it gets shorter on purpose, by the change that honours a value."""
    assert rules.NOT_YET == NOT_YET
    assert set(rules.NOT_YET_SET) == set(NOT_YET_SET)


@pytest.mark.parametrize("field", rules.CHOICES)
def test_every_choice_is_accepted_or_not_yet(field: str) -> None:
    accepted = [value for value, _, _ in ACCEPTED[field]]
    for value in rules.CHOICES[field]:
        assert (value in accepted) != (value in NOT_YET.get(field, ())), f"{field}={value!r}"


@pytest.mark.parametrize("field", FIELDS)
def test_every_value_is_accepted_somewhere(field: str) -> None:
    for value, base, tied in ACCEPTED[field]:
        pair = change(base, {**tied, field: value})
        rules.check(*pair)
        assert emit(fagen.plan(*pair)).text


@pytest.mark.parametrize("field, value", [(f, v) for f, values in (NOT_YET | NOT_YET_SET).items() for v in values], ids=str)
@pytest.mark.parametrize("base", [FA2, FA3], ids=["fa2", "fa3"])
def test_what_is_not_yet_honoured_says_so(field: str, value: object, base: Pair) -> None:
    with pytest.raises(ScheduleError) as e:
        fagen.plan(*change(base, {field: value}))
    (violation,) = e.value.violations
    assert (violation.code, violation.field) == ("not-yet", field)
    assert repr(value) in violation.message and violation.nearest and value not in violation.nearest


@pytest.mark.parametrize("field", EFFECT)
def test_a_changed_value_changes_the_program_and_the_code(field: str) -> None:
    for base, before, after in EFFECT[field]:
        left, right = change(base, before), change(base, after)
        assert getattr(left[0], field, getattr(left[1], field, None)) != getattr(right[0], field, getattr(right[1], field, None))
        p, q = fagen.plan(*left), fagen.plan(*right)
        assert p.kernels != q.kernels, f"{before} and {after} are the same program"
        assert emit(p).code_sha256 != emit(q).code_sha256, f"{before} and {after} are the same code"


@pytest.mark.parametrize("field", [f for f in EFFECT if f not in ("arch", "mma", "movement")])
def test_an_effect_is_the_fields_own(field: str) -> None:
    """At least one of the pairs differs in this field and, where others are tied to it, in nothing that is free."""
    tied = {"tile_q": {"consumers", "warps", "overlap"}, "consumers": {"tile_q"}, "precision": {"scale_granularity"}}
    assert any(
        set(change(base, before)[0].diff(change(base, after)[0])) | set(change(base, before)[1].diff(change(base, after)[1]))
        <= {field} | tied.get(field, set())
        for base, before, after in EFFECT[field]
    )


def test_arch_changes_the_cubin() -> None:
    """The same mma.sync source for sm_80 and sm_90 becomes other machine code."""
    sources = [
        emit(fagen.plan(*change(FA2, {"arch": arch, "warps": 4, "tile_q": 64, "tile_kv": 16}))) for arch in ("sm_80", "sm_90")
    ]
    assert [s.arch for s in sources] == ["sm_80", "sm_90"]
    cubins = [compile_cubin(s.text, s.arch, s.arch).cubin for s in sources]
    assert cubins[0] != cubins[1]


def test_defaults_are_the_same_as_their_values() -> None:
    """Where None stands for a value that follows from the others, saying it changes nothing in the code."""
    same: list[tuple[Pair, Changes]] = [
        (FA3, {"head_dim_v": 64}),
        (FA3, {"out_dtype": "bf16"}),
        (FA3, {"scale": 0.125}),
        (FA3_2, {"registers": (24, 240)}),
        (FA3, {"stages": (2, 2)}),
        (FP8, {"scale_granularity": "head"}),
        ((FP8[0].replace(dtype="int8"), FP8[1]), {"v_dtype": "e4m3"}),
        (QUANTISED, {"scale_granularity": "head"}),
    ]
    for base, changes in same:
        assert emit(fagen.plan(*base)).code_sha256 == emit(fagen.plan(*change(base, changes))).code_sha256


def test_every_field_is_documented() -> None:
    """A string under each field says what it is."""
    import ast
    import inspect

    for kind in (Attention, Schedule):
        (body,) = (n.body for n in ast.parse(inspect.getsource(kind)).body if isinstance(n, ast.ClassDef))
        documented = {
            a.target.id
            for a, b in itertools.pairwise(body)
            if isinstance(a, ast.AnnAssign) and isinstance(a.target, ast.Name) and isinstance(b, ast.Expr)
        }
        assert documented == {f.name for f in dataclasses.fields(kind)}
