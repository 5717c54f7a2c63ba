"""The rules: every code with its numbers and legal ways out, the order of the layers, and a folder of illegal schedules."""

from __future__ import annotations

import ast
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fp8_steps import PAPER_FP8

import fagen
from fagen import Attention, Schedule, ScheduleError, Violation
from fagen.plan import rules, scales
from fagen.target import TARGETS, target

FA2, FA3, FP8 = fagen.load("fa2"), fagen.load("fa3"), fagen.load(PAPER_FP8)
QUANTISED = fagen.load(PAPER_FP8, dtype="bf16", precision="e4m3")
FA1, STANDARD = fagen.load("fa1"), fagen.load("standard")
NAMES = {FA1[1]: "fa1", STANDARD[1]: "standard", FA2[1]: "fa2", FA3[1]: "fa3", FP8[1]: PAPER_FP8}
ILLEGAL = sorted((Path(__file__).parents[1] / "illegal").glob("*.py"))

Pair = tuple[Attention, Schedule]


def change(base: Pair, changes: dict[str, Any]) -> Pair:
    """Fields of either value replaced; with a head_dim come the tiles that the built-in schedule has for it."""
    if changes.get("head_dim") in rules.HEAD_DIMS and base[1] in NAMES:
        return fagen.load(NAMES[base[1]], **changes)
    mine = {k: v for k, v in changes.items() if k in Attention.field_names()}
    return base[0].replace(**mine), base[1].replace(**{k: v for k, v in changes.items() if k not in mine})


def violations(pair: Pair) -> tuple[Violation, ...]:
    """What `check` raises, or nothing."""
    try:
        rules.check(*pair)
    except ScheduleError as e:
        return e.violations
    return ()


def ways_out(violation: Violation) -> list[dict[str, Any]]:
    """The nearest legal values as changes: a value of the field, or "knob=value" where another knob may give way."""
    out = []
    for value in violation.nearest:
        if isinstance(value, str) and "=" in value:
            knob, number = value.split("=")
            out.append({knob: None if number == "None" else int(number)})
        else:
            out.append({violation.field: value})
    return out


# One mistake each: base, changes, code, field, what the message must say.
MISTAKES: list[tuple[Pair, dict[str, Any], str, str, tuple[str, ...]]] = [
    # values
    (FA3, {"dtype": "fp32"}, "dtype", "dtype", ("'fp32'", "'bf16'", "'fp16'")),
    (FA3, {"out_dtype": "fp32"}, "out-dtype", "out_dtype", ("'fp32'",)),
    (FA3, {"v_dtype": "fp16"}, "v-dtype", "v_dtype", ("'fp16'", "bf16", "'int8'")),
    (FP8, {"dtype": "int8", "v_dtype": "int8", "tile_kv": 192}, "v-dtype", "v_dtype", ("'int8'", "'e4m3'", "'fp16'")),
    (FA3, {"mask": "diagonal"}, "mask", "mask", ("'diagonal'", "'causal'")),
    (FA3, {"sink": 0}, "sink", "sink", ("0", "False")),
    (FA3, {"arch": "sm_100a"}, "arch", "arch", ("'sm_100a'", "'sm_90a'")),
    (FA3, {"loop_order": "inner"}, "loop-order", "loop_order", ("'inner'", "'q_outer'")),
    (FA3, {"parallelism": "persistent"}, "parallelism", "parallelism", ("'persistent'", "'persistent_static'")),
    (FA3, {"partition": "split"}, "partition", "partition", ("'split'", "'split_q'")),
    (FA3, {"roles": "consumer"}, "roles", "roles", ("'consumer'", "'producer'")),
    (FA2, {"warps": 3}, "warps", "warps", ("3", "1, 2, 4, 8")),
    (FA2, {"warps": 8.0}, "warps", "warps", ("8.0",)),
    (FA3, {"consumers": 5}, "consumers", "consumers", ("5", "1, 2, 3, 4")),
    (FA3, {"movement": "ldgsts"}, "movement", "movement", ("'ldgsts'", "'tma'")),
    (FA3, {"mma": "tcgen05"}, "mma", "mma", ("'tcgen05'", "'wgmma'")),
    (FA3, {"p_operand": "smem"}, "p-operand", "p_operand", ("'smem'", "'registers'")),
    (FA3, {"overlap": "ping-pong"}, "overlap", "overlap", ("'ping-pong'", "'pingpong'")),
    (FA3, {"softmax": "online"}, "softmax", "softmax", ("'online'", "'fused'")),
    (FA3, {"normalise": "never"}, "normalise", "normalise", ("'never'", "'once'")),
    (FA3, {"reference": "maximum"}, "reference", "reference", ("'maximum'", "'running'")),
    (FA3, {"scale_granularity": "row"}, "scale-granularity", "scale_granularity", ("'row'", "'head'")),
    (FA3, {"scale_granularity": "head"}, "scale-granularity", "scale_granularity", ("'head'", "bf16")),
    (FP8, {"scale_granularity": None}, "scale-granularity", "scale_granularity", ("e4m3",)),
    *((FP8, {"promote_every": n}, "promote-every", "promote_every", (repr(n), "4096")) for n in (0, -1, 4097, 1.5, True, math.inf, math.nan, "1")),
    (FA3, {"promote_every": 1}, "promote-every", "promote_every", ("1", "float32")),
    (FA3, {"hadamard": 1}, "hadamard", "hadamard", ("1", "False")),
    (FA3, {"v_transposed": None}, "v-transposed", "v_transposed", ("None", "False")),
    (FA3, {"mask": "window"}, "not-yet", "mask", ("'window'", "no kernel honours it yet")),
    (FA3, {"softcap": 30.0}, "not-yet", "softcap", ("30.0", "no kernel honours it yet")),
    (FA2, {"head_dim": 96}, "head-dim", "head_dim", ("96",)),
    (FA2, {"head_dim": 128.0}, "head-dim", "head_dim", ("128.0",)),
    (FA3, {"head_dim_v": 64}, "head-dim-v", "head_dim_v", ("64", "128")),
    *((FA3, {"scale": x}, "scale", "scale", (repr(x),)) for x in (math.nan, math.inf, 0.0, -1.0, "1", True, 1e-60)),
    (FA2, {"tile_q": 100}, "tile-q", "tile_q", ("100", "multiple of 16", "256")),
    (FA2, {"tile_q": 0}, "tile-q", "tile_q", ("0",)),
    (FA2, {"tile_q": 128.0}, "tile-q", "tile_q", ("128.0",)),
    (FA3, {"tile_kv": 100}, "tile-kv", "tile_kv", ("100", "multiple of 16", "256")),
    (FA3, {"tile_kv": 272}, "tile-kv", "tile_kv", ("272", "256")),
    (FA3, {"tile_kv": -16}, "tile-kv", "tile_kv", ("-16",)),
    (FA3, {"tile_kv": True}, "tile-kv", "tile_kv", ("True",)),
    *((FA3, {"stages": x}, "stages", "stages", (repr(x), "1 to 4")) for x in (0, 5, (1,), (1, 2, 3), (2, 5), [2, 2], "2", None)),
    *((FA3, {"registers": x}, "registers", "registers", (repr(x), "24 to 256")) for x in (240, (24,), (20, 240), (24, 250), (24, 264))),
    # structure
    (FA3, {"arch": "sm_90"}, "arch-mma", "arch", ("sm_90", "mma_sync", "wgmma")),
    (FA2, {"arch": "sm_90a"}, "arch-mma", "arch", ("sm_90a", "wgmma", "mma_sync")),
    (FA3, {"movement": "cp_async"}, "mma-movement", "movement", ("wgmma", "tma", "cp_async")),
    (FA2, {"movement": "tma"}, "mma-movement", "movement", ("mma_sync", "cp_async", "tma")),
    (FA3, {"warps": 8}, "warps", "warps", ("8", "consumers")),
    (FA2, {"warps": None}, "warps", "warps", ("number of warps",)),
    (FA3, {"consumers": None}, "consumers", "consumers", ("warpgroups",)),
    (FA2, {"consumers": 2}, "consumers", "consumers", ("2", "warps")),
    (FA3, {"tile_q": 192}, "tile-q", "tile_q", ("192", "64", "2 warpgroups")),
    (FA2, {"tile_q": 64}, "tile-q", "tile_q", ("64", "16", "8 warps")),
    (FA3, {"roles": "uniform"}, "overlap", "overlap", ("'both'", "'producer'")),
    (FA3, {"consumers": 1, "tile_q": 64}, "overlap", "overlap", ("'both'", "at least 2", "1")),
    (FA2, {"overlap": "within"}, "overlap", "overlap", ("'within'", "wgmma")),
    (FA3, {"roles": "uniform", "overlap": "none", "tile_kv": 80, "registers": (24, 240)}, "registers", "registers", ("(24, 240)", "uniform")),
    (FA2, {"registers": (24, 240)}, "registers", "registers", ("(24, 240)", "setmaxnreg")),
    (FA3, {"parallelism": "batch_heads"}, "parallelism", "parallelism", ("'batch_heads'", "mma_sync")),
    (FA2, {"parallelism": "persistent_static"}, "parallelism", "parallelism", ("'persistent_static'", "wgmma")),
    (FA2, {"roles": "producer"}, "roles", "roles", ("'producer'", "wgmma")),
    (FA2, {"head_dim": 64, "tile_kv": 48}, "tile-kv", "tile_kv", ("48", "384", "256 threads")),
    (FA3, {"reference": "stale", "overlap": "pingpong"}, "reference", "reference", ("'pingpong'",)),
    (FP8, {"reference": "stale", "v_transposed": True, "tile_kv": 128}, "reference", "reference", ("'stale'", "transposed")),
    (FA2, {"reference": "stale"}, "reference", "reference", ("'stale'", "wgmma")),
    (FA3, {"fuse_tiles": True}, "fuse-tiles", "fuse_tiles", ("reference='stale'",)),
    (FA2, {"fuse_tiles": True}, "fuse-tiles", "fuse_tiles", ("wgmma",)),
    (FA3, {"fuse_tiles": True, "tile_kv": 128, "reference": "stale", "stages_q": 2}, "stages-q", "stages_q", ("2 given", "joined")),
    (FA3, {"stages_q": 3}, "stages-q", "stages_q", ("3", "slots")),
    (FA3, {"tile_kv": 64, "stages_q": 2, "parallelism": "query_tiles"}, "stages-q", "stages_q", ("2 slots", "persistent_dynamic")),
    (FA2, {"q_operand": "registers"}, "q-operand", "q_operand", ("mma_sync", "'registers'")),
    (FA3, {"q_operand": "smem"}, "q-operand", "q_operand", ("'smem'", "'registers'")),
    (FA3, {"tile_kv": 64, "stages_q": 2, "q_operand": "registers"}, "stages-q", "stages_q", ("2 slots", "registers")),
    (
        FA3,
        {"head_dim": 64, "tile_kv": 64, "overlap": "within", "reference": "stale", "fuse_tiles": True, "stages_q": 2, "q_operand": "registers"},
        "stages-q",
        "stages_q",
        ("2 slots", "registers"),
    ),
    (FA2, {"stages_q": 2}, "stages-q", "stages_q", ("mma='wgmma'", "roles='producer'")),
    (FA3, {"skip_masked": True}, "skip-masked", "skip_masked", ("mask 'causal'",)),
    (FA2, {"skip_masked": True}, "skip-masked", "skip_masked", ("mask 'causal'", "roles 'producer'")),
    (FA2, {"dtype": "e4m3"}, "dtype", "dtype", ("e4m3", "mma_sync")),
    (FA3, {"precision": "fp8"}, "precision", "precision", ("'fp8'", "'e4m3'")),
    (FP8, {"precision": "e4m3"}, "precision", "precision", ("e4m3", "quantised already")),
    (FA2, {"precision": "e4m3"}, "precision", "precision", ("e4m3", "mma_sync")),
    (QUANTISED, {"v_transposed": True}, "v-transposed", "v_transposed", ("plan quantises",)),
    (QUANTISED, {"roles": "uniform", "overlap": "none", "stages": 1, "tile_kv": 64}, "roles", "roles", ("uniform", "transpose")),
    (FA3, {"hadamard": True}, "hadamard", "hadamard", ("precision",)),
    (FP8, {"hadamard": True}, "hadamard", "hadamard", ("16-bit",)),
    (FA3, {"smooth_k": True}, "smooth-k", "smooth_k", ("mean", "precision")),
    (FA3, {"scale_granularity": "head"}, "scale-granularity", "scale_granularity", ("'head'", "bf16")),
    (FA3, {"scale_granularity": "row"}, "scale-granularity", "scale_granularity", ("'row'", "'head'")),
    (FA3, {"hadamard": 1}, "hadamard", "hadamard", ("1", "True")),
    (FA3, {"smooth_k": None}, "smooth-k", "smooth_k", ("None", "False")),
    (FA3, {"v_transposed": True}, "v-transposed", "v_transposed", ("e4m3", "bf16")),
    (FP8, {"roles": "uniform", "overlap": "none", "stages": 1, "tile_kv": 64}, "v-transposed", "v_transposed", ("uniform", "transpose")),
    (FP8, {"tile_kv": 80}, "tile-kv", "tile_kv", ("80", "32")),
    (FA1, {"stages": 2}, "stages", "stages", ("2 slots", "'ld_st'")),
    (FA1, {"tile_kv": 96}, "tile-kv", "tile_kv", ("96", "16 keys", "4 warps")),
    (FA3, {"loop_order": "kv_outer"}, "loop-order", "loop_order", ("'kv_outer'", "mma_sync")),
    (FA3, {"partition": "split_kv"}, "partition", "partition", ("'split_kv'", "mma_sync")),
    (FA3, {"normalise": "each_step"}, "normalise", "normalise", ("'each_step'", "mma_sync")),
    (STANDARD, {"parallelism": "batch_heads"}, "softmax", "parallelism", ("'three_pass'", "'query_tiles'", "'batch_heads'")),
    (STANDARD, {"tile_kv": 32}, "tile-kv", "tile_kv", ("32", "64")),
    # resources
    (FA3, {"tile_kv": 192, "stages": 3}, "smem", "tile_kv", ("328192", "232448", "3 K", "3 V")),
    (FA2, {"arch": "sm_80", "tile_kv": 144}, "smem", "tile_kv", ("180736", "166912", "2 K", "2 V")),
    (FA3, {"registers": (24, 232), "stages": (2, 1)}, "registers", "registers", ("24", "32", "one slot")),
    (FP8, {"registers": (24, 232)}, "registers", "registers", ("24", "32", "transpose")),
    (FA3, {"registers": (56, 240)}, "register-pool", "registers", ("128·(56 + 2·240)", "68608", "64512")),
    (FA3, {"tile_kv": 16, "registers": (160, 152)}, "registers", "registers", ("152", "160")),
    (FA3, {"registers": (24, 160)}, "registers", "tile_kv", ("S 88", "P 44", "O 64", "160")),
    (FA3, {"registers": (24, 64)}, "registers", "tile_kv", ("S 88", "P 44", "O 64", "64")),  # no tile_kv needs so few
    (FA2, {"registers": (100, 100)}, "registers", "registers", ("(100, 100)", "multiples of 8")),
    (FA3, {"tile_q": np.int64(128)}, "python-value", "tile_q", ("128", "numpy.int64")),
    (FA3, {"stages": (np.int32(2), 2)}, "python-value", "stages", ("2", "numpy.int32")),
    (FA3, {"tile_q": np.int64(130)}, "python-value", "tile_q", ("130", "numpy.int64")),  # and no tile either
    (FA3, {"scale": np.longdouble(1000)}, "python-value", "scale", ("1000", "numpy.longdouble")),
    (FA3, {"scale": Fraction(1, 8)}, "python-value", "scale", ("(1, 8)", "fractions.Fraction")),
    (FA3, {"fuse_tiles": np.bool_(False)}, "python-value", "fuse_tiles", ("False", "numpy.bool")),
    (FA3, {"mask": np.str_("causal")}, "python-value", "mask", ("causal", "numpy.str_")),
    (FA3, {"scale": np.float32(0.5)}, "python-value", "scale", ("0.5", "numpy.float32")),
    (FA3, {"scale": 1000}, "scale", "scale", ("1000", "256")),
    (FA2, {"tile_q": 256, "tile_kv": 128}, "registers", "tile_kv", ("S 128", "P 64", "O 128", "255")),
]  # fmt: skip


@pytest.mark.parametrize(
    "value",
    [10**400, 10**5000, "x" * 500, (10**5000, 2), Fraction(10**5000), np.str_("x" * 500)],
    ids=["401 digits", "more than Python prints", "text", "in a pair", "another library's number", "another library's text"],
)
@pytest.mark.parametrize("field", [*Attention.field_names(), *Schedule.field_names()])
def test_a_value_of_any_length_is_said_in_a_line(field: str, value: object) -> None:
    with pytest.raises(ScheduleError) as caught:
        rules.check(*change(FA3, {field: value}))
    assert all(len(v.message) < 300 for v in caught.value.violations) and field in {v.field for v in caught.value.violations}


def name_of(mistake: tuple[Pair, dict[str, Any], str, str, tuple[str, ...]]) -> str:
    return f"{mistake[2]}: " + ", ".join(f"{k}={str(v)[:12]}" for k, v in mistake[1].items())


@pytest.mark.parametrize("mistake", MISTAKES, ids=name_of)
def test_a_single_mistake(mistake: tuple[Pair, dict[str, Any], str, str, tuple[str, ...]]) -> None:
    """One violation, with its numbers; each value it offers removes it, and at least one of them makes the pair legal."""
    base, changes, code, field, said = mistake
    pair = change(base, changes)
    (found,) = violations(pair)
    assert (found.code, found.field) == (code, field)
    for text in said:
        assert text in found.message, found.message
    assert found.nearest, "no way out is offered"
    offered = [violations(change(pair, way)) for way in ways_out(found)]
    for way, left in zip(ways_out(found), offered):
        assert (code, field) not in {(v.code, v.field) for v in left}, f"{way} does not mend it: {left}"
    assert () in offered, f"none of {ways_out(found)} is legal: {offered}"


def all_codes() -> set[str]:
    """Every code the rules can give: literals in the calls that make a Violation, and those made from a field's name."""
    codes = {name.replace("_", "-") for name in rules.CHOICES}
    files = [*Path(rules.__path__[0]).glob("*.py"), Path(scales.__file__)]
    for node in (n for file in files for n in ast.walk(ast.parse(file.read_text(encoding="utf-8")))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("Violation", "nearest_int"):
            first = node.args[0]
            if isinstance(first, ast.Constant):
                codes.add(first.value)
    return codes


def test_every_code_has_a_mistake() -> None:
    assert all_codes() == {m[2] for m in MISTAKES}


@pytest.mark.parametrize(
    "base, changes, nearest",
    [
        (FA3, {"tile_kv": 100}, (96, 112, 80, 128)),
        (FA3, {"tile_kv": 1000}, (192, 176, 160, 144)),  # larger ones do not fit shared memory
        (FA2, {"tile_q": 300}, (128,)),  # 256 rows do not fit registers
        (FA2, {"tile_kv": 40}, (48, 32, 64, 16)),
        (FA3, {"head_dim": 192}, (64, 128, 256)),
    ],
)
def test_the_nearest_legal_values_come_first(base: Pair, changes: dict[str, Any], nearest: tuple[int, ...]) -> None:
    (found,) = violations(change(base, changes))
    assert sorted(found.nearest) == sorted(nearest)
    (value,) = changes.values()
    assert found.field == "head_dim" or [abs(x - value) for x in found.nearest] == sorted(abs(x - value) for x in nearest)


@pytest.mark.parametrize("mistake", ["smem", "registers"])
def test_the_tile_offered_is_the_largest_that_fits(mistake: str) -> None:
    pair = change(FA3, {"tile_kv": 256, "stages": 1, "head_dim": 128} if mistake == "registers" else {"tile_kv": 192, "stages": 4})
    found = violations(pair)[0]
    assert found.code == mistake
    kv = next(way["tile_kv"] for way in ways_out(found) if "tile_kv" in way)
    assert mistake not in {v.code for v in violations(change(pair, {"tile_kv": kv}))}
    assert mistake in {v.code for v in violations(change(pair, {"tile_kv": kv + 16}))}


# layers -------------------------------------------------------------------------------------------------------------------


def test_all_violations_of_the_first_failing_layer_at_once() -> None:
    wrong = change(FA3, {"head_dim": 65, "mask": "diagonal", "tile_q": 7, "stages": 9, "warps": 8, "movement": "cp_async"})
    assert sorted(v.code for v in violations(wrong)) == ["head-dim", "mask", "stages", "tile-q"]
    wrong = change(wrong, {"head_dim": 256, "mask": "full", "tile_q": 64, "stages": 4})
    assert sorted(v.code for v in violations(wrong)) == ["mma-movement", "tile-q", "warps"]
    wrong = change(wrong, {"tile_q": 128, "warps": None, "movement": "tma"})
    assert sorted(v.code for v in violations(wrong)) == ["registers", "smem"]


def test_the_error_prints_one_line_a_violation() -> None:
    with pytest.raises(ScheduleError) as e:
        fagen.plan(*change(FA3, {"tile_q": 7, "stages": 9}))
    assert e.value.codes == ("tile-q", "stages")
    lines = str(e.value).splitlines()
    assert lines[0].startswith("[tile-q] tile_q: 7 is not a multiple of 16") and "nearest legal: 16" in lines[0]
    assert lines[1].startswith("[stages] stages: 9 is neither") and len(lines) == 2


@pytest.mark.parametrize("changes", [{"stages": [2, 2]}, {"registers": [24, 240]}, {"mask": {}}, {"head_dim": []}])
def test_values_that_cannot_be_hashed_are_violations_too(changes: dict[str, Any]) -> None:
    with pytest.raises(ScheduleError):
        fagen.plan(*change(FA3, changes))


@pytest.mark.parametrize("changes", [{"tile_q": 128.0}, {"hadamard": 0}, {"sink": 0}, {"tile_kv": 176.0}])
def test_a_value_that_merely_equals_a_legal_one_is_not_legal(changes: dict[str, Any]) -> None:
    """128.0 == 128 and False == 0 in Python: a plan made for the one must not answer for the other."""
    fagen.plan(*FA3)
    with pytest.raises(ScheduleError):
        fagen.plan(*change(FA3, changes))


# targets ------------------------------------------------------------------------------------------------------------------


def test_targets_are_data() -> None:
    assert list(TARGETS) == ["sm_80", "sm_90", "sm_90a"]
    assert {n: t.smem_bytes for n, t in TARGETS.items()} == {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_90a": 227 * 1024}
    with pytest.raises(ScheduleError, match=r"\[arch\] arch: unknown target 'sm_70'.*sm_80, sm_90, sm_90a"):
        target("sm_70")


def test_sm_80_has_less_shared_memory() -> None:
    """What sm_90 takes, with 176 KiB of tiles, is too much for sm_80."""
    pair = change(FA2, {"tile_kv": 144})
    assert violations(pair) == ()
    (found,) = violations(change(pair, {"arch": "sm_80"}))
    assert found.code == "smem" and "166912" in found.message


# the folder of illegal schedules -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ILLEGAL, ids=lambda p: p.stem)
def test_illegal_schedule(path: Path) -> None:
    """The first line of the file is `# code: part of the message`."""
    code, fragment = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ").split(": ", 1)
    with pytest.raises(ScheduleError) as e:
        fagen.plan(*fagen.load(path))
    assert code in e.value.codes
    assert any(v.code == code and fragment in v.message for v in e.value.violations), str(e.value)


def test_the_folder_is_not_empty() -> None:
    assert len(ILLEGAL) >= 20


def test_one_slot_for_q_is_offered_where_it_mends() -> None:
    """And nothing that another rule refuses."""
    with pytest.raises(ScheduleError) as e:
        fagen.plan(*fagen.load("fa3", head_dim=256, tile_kv=64, stages=(3, 2), stages_q=2, overlap="none"))
    smem = next(v for v in e.value.violations if v.code == "smem")
    assert "2 Q, 3 K and 2 V tiles" in smem.message and "stages_q=None" in smem.nearest
    wrong = {"head_dim": 256, "tile_kv": 64, "stages": (3, 2), "stages_q": 2, "overlap": "none"}
    for way in smem.nearest:
        knob, _, value = str(way).partition("=")
        fagen.plan(*fagen.load("fa3", **{**wrong, knob: None if value == "None" else int(value)}))
