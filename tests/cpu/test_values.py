"""Attention and Schedule as values: replace, sweep, diff, JSON, ids."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fagen
from fagen import Attention, Schedule, ScheduleError

IDS = {"fa2": ("3a129ec6", "5ff0b1d8"), "fa3": ("3a129ec6", "44f85a0d")}
ROOT = Path(fagen.__file__).parents[1]

BASE = Schedule(arch="sm_90a", tile_q=128, tile_kv=128, consumers=2, movement="tma", mma="wgmma", stages=2)
MAYBE_INT = st.none() | st.integers(1, 512)
PAIR = st.tuples(st.integers(0, 512), st.integers(0, 512))
WORD = st.text(max_size=12)
ATTENTIONS = st.builds(
    Attention,
    head_dim=st.integers(1, 1024),
    head_dim_v=MAYBE_INT,
    dtype=WORD,
    out_dtype=st.none() | WORD,
    mask=WORD,
    scale=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    window=st.none() | PAIR,
    softcap=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    sink=st.booleans(),
)
SCHEDULES = st.builds(
    Schedule,
    arch=WORD,
    tile_q=st.integers(),
    tile_kv=st.integers(),
    warps=MAYBE_INT,
    consumers=MAYBE_INT,
    registers=st.none() | PAIR,
    stages=st.integers(1, 4) | PAIR,
    overlap=WORD,
    hadamard=st.booleans(),
    promote_every=MAYBE_INT,
)


# replace, sweep, diff -----------------------------------------------------------------------------------------------------


def test_replace_makes_a_changed_copy() -> None:
    other = BASE.replace(tile_kv=96, stages=(2, 3))
    assert (other.tile_kv, other.stages, BASE.tile_kv, BASE.stages) == (96, (2, 3), 128, 2)
    assert other.replace(tile_kv=128, stages=2) == BASE


def test_values_are_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        BASE.tile_q = 64  # type: ignore[misc]
    with pytest.raises(TypeError):
        Attention(64)  # type: ignore[misc]


def test_sweep_is_the_product_with_the_last_field_fastest() -> None:
    swept = BASE.sweep(tile_kv=(96, 128), stages=(2, 3))
    assert [(s.tile_kv, s.stages) for s in swept] == [(96, 2), (96, 3), (128, 2), (128, 3)]
    assert swept[2] == BASE
    assert BASE.sweep() == (BASE,)
    assert BASE.sweep(stages=()) == ()


def test_diff_names_what_differs_with_both_values() -> None:
    assert BASE.diff(BASE.replace(tile_kv=96, overlap="both")) == {"tile_kv": (128, 96), "overlap": ("none", "both")}
    assert BASE.diff(BASE) == {}
    with pytest.raises(TypeError, match="Schedule with Attention"):
        BASE.diff(Attention(head_dim=64))


# unknown and missing knobs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong, close",
    [("tile_kw", "tile_kv"), ("stage", "stages"), ("over_lap", "overlap"), ("normalize", "normalise"), ("consumer", "consumers")],
)
def test_an_unknown_knob_suggests_close_ones(wrong: str, close: str) -> None:
    for use in (BASE.replace, BASE.sweep):
        with pytest.raises(ScheduleError) as e:
            use(**{wrong: (1,)})
        (violation,) = e.value.violations
        assert (violation.code, violation.field) == ("unknown-knob", wrong)
        assert close in violation.nearest and close in str(e.value)


def test_every_unknown_knob_is_reported() -> None:
    with pytest.raises(ScheduleError) as e:
        Attention.from_dict({"head_dim": 64, "head_dims": 1, "qqq": 2})
    assert e.value.codes == ("unknown-knob", "unknown-knob")
    assert "head_dim" in e.value.violations[0].nearest and e.value.violations[1].nearest == ()


def test_every_missing_knob_is_reported() -> None:
    with pytest.raises(ScheduleError) as e:
        Schedule.from_dict({"arch": "sm_90"})
    assert [(v.code, v.field) for v in e.value.violations] == [("missing-knob", "tile_q"), ("missing-knob", "tile_kv")]


# JSON ---------------------------------------------------------------------------------------------------------------------


@given(ATTENTIONS | SCHEDULES)
def test_json_round_trip_is_exact(value: Attention | Schedule) -> None:
    again = type(value).from_json(value.to_json())
    assert again == value and again.id == value.id
    for name in value.field_names():
        assert type(getattr(again, name)) is type(getattr(value, name)), name


@given(ATTENTIONS | SCHEDULES)
def test_pickle_copy_and_hash_keep_the_value(value: Attention | Schedule) -> None:
    for again in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value)):
        assert again == value and hash(again) == hash(value)


def test_json_holds_every_field_in_order() -> None:
    assert list(json.loads(BASE.to_json())) == [f.name for f in dataclasses.fields(Schedule)]


# ids ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IDS)
def test_ids_of_the_built_in_schedules_stay(name: str) -> None:
    """An id names files, caches and evidence: a change here is a change of the schedule, and must be meant."""
    attention, schedule = fagen.load(name)
    assert (attention.id, schedule.id) == IDS[name]


def test_ids_are_the_same_in_every_process(tmp_path: Path) -> None:
    code = "import fagen; print(*(x.id for n in ('fa2', 'fa3') for x in fagen.load(n)))"
    for seed in ("0", "7"):
        env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        out = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
        assert out.stdout.split() == [x for n in ("fa2", "fa3") for x in IDS[n]]


def test_every_field_enters_the_id() -> None:
    """Also where Python takes two values for equal: True and 1 are different knob values."""
    ids = {BASE.id}
    for field in dataclasses.fields(Schedule):
        ids.add(BASE.replace(**{field.name: "another"}).id)
    assert len(ids) == 1 + len(dataclasses.fields(Schedule))
    assert BASE.replace(hadamard=0).id != BASE.id != BASE.replace(hadamard=True).id


def test_a_field_at_its_default_does_not_enter_the_id() -> None:
    assert Attention(head_dim=64, dtype="bf16", sink=False).id == Attention(head_dim=64).id


@given(SCHEDULES, SCHEDULES)
def test_ids_are_equal_where_the_values_are(a: Schedule, b: Schedule) -> None:
    assert (a.id == b.id) == (a == b)


# what the fields derive ---------------------------------------------------------------------------------------------------


def test_attention_derives_what_is_left_open() -> None:
    a = Attention(head_dim=64)
    assert (a.dv, a.output_dtype, a.softmax_scale) == (64, "bf16", 0.125)
    assert a.scale_log2 == pytest.approx(0.125 * math.log2(math.e), rel=1e-15)
    assert Attention(head_dim=64, dtype="e4m3").output_dtype == "bf16"
    assert Attention(head_dim=64, dtype="fp16").output_dtype == "fp16"
    assert Attention(head_dim=64, head_dim_v=128, scale=2.0).dv == 128
    assert Attention(head_dim=64, mask="causal").label == "hd64 bf16 causal"


def test_schedule_splits_its_stages() -> None:
    assert (BASE.stages_k, BASE.stages_v) == (2, 2)
    assert (BASE.replace(stages=(1, 3)).stages_k, BASE.replace(stages=(1, 3)).stages_v) == (1, 3)


# errors -------------------------------------------------------------------------------------------------------------------


def test_errors_cross_process_borders() -> None:
    with pytest.raises(ScheduleError) as e:
        fagen.plan(Attention(head_dim=65), BASE)
    again = pickle.loads(pickle.dumps(e.value))
    assert again.violations == e.value.violations and str(again) == str(e.value)
    error = fagen.InputError("q", "is on another device")
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == "q: is on another device"
