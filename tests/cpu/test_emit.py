"""The emitted CUDA as text: what a reader may rely on, for every variant of the built-in schedules."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fp8_steps import PAPER_FP8

import fagen
from fagen.emit import Source, code_sha256, emit, templates
from fagen.library import builtin_names, resource_dir
from fagen.plan import Plan, plan
from fagen.plan.removal import without
from fagen.plan.steps import Loop, walk
from fagen.quantise import checked_options, plan_of

ROOT = Path(fagen.__file__).parents[1]


def variants() -> Iterator[tuple[str, dict[str, Any]]]:
    for name in builtin_names():
        for head_dim in (64, 128, 256):
            for mask in ("full", "causal"):
                yield name, {"head_dim": head_dim, "mask": mask}
    for overlap in ("none", "within", "pingpong"):
        yield "fa3", {"overlap": overlap}
    for parallelism in ("query_tiles", "persistent_static"):
        yield "fa3", {"parallelism": parallelism, "dtype": "fp16"}
    yield "fa3", {"roles": "uniform", "overlap": "within", "tile_kv": 128, "stages": 1}
    yield "fa3", {"roles": "uniform", "overlap": "none", "tile_kv": 64, "stages": (1, 3), "parallelism": "query_tiles"}
    yield "fa3", {"head_dim": 64, "consumers": 4, "tile_q": 256, "tile_kv": 64}
    yield "fa3", {"reference": "stale", "tile_kv": 128, "mask": "causal"}
    yield "fa3", {"reference": "stale", "tile_kv": 96, "overlap": "within", "dtype": "fp16"}
    yield PAPER_FP8, {"reference": "stale", "tile_kv": 160, "mask": "causal"}
    yield "fa3", {"reference": "stale", "tile_kv": 112, "fuse_tiles": True}
    yield "fa3", {"reference": "stale", "tile_kv": 64, "mask": "causal", "skip_masked": True}
    yield "fa3", {"q_operand": "registers", "tile_kv": 96, "mask": "causal", "skip_masked": True}
    yield PAPER_FP8, {"q_operand": "registers", "reference": "stale", "head_dim": 256, "tile_kv": 64}
    yield PAPER_FP8, {"q_operand": "registers", "reference": "stale", "head_dim": 64, "tile_kv": 64, "fuse_tiles": True}
    yield PAPER_FP8, {"v_transposed": True}
    yield PAPER_FP8, {"scale_granularity": "tensor", "overlap": "within"}
    yield PAPER_FP8, {"scale_granularity": "block", "reference": "stale", "tile_kv": 128}
    yield PAPER_FP8, {"scale_granularity": "block", "promote_every": 3, "reference": "stale", "tile_kv": 64}
    yield PAPER_FP8, {"reference": "stale", "tile_kv": 128, "fuse_tiles": True}
    yield PAPER_FP8, {"promote_every": 1, "tile_kv": 96}
    yield PAPER_FP8, {"dtype": "bf16", "precision": "e4m3"}
    yield PAPER_FP8, {"dtype": "fp16", "precision": "e4m3", "hadamard": True, "head_dim": 64}
    yield PAPER_FP8, {"dtype": "bf16", "precision": "e4m3", "smooth_k": True, "hadamard": True, "head_dim": 256}
    yield PAPER_FP8, {"dtype": "int8", "reference": "stale", "tile_kv": 128, "fuse_tiles": True}
    yield PAPER_FP8, {"dtype": "bf16", "precision": "int8", "smooth_k": True, "hadamard": True, "mask": "causal"}
    yield PAPER_FP8, {"dtype": "int8", "v_dtype": "bf16", "mask": "causal", "skip_masked": True}
    yield PAPER_FP8, {"dtype": "fp16", "precision": "int8_qk", "hadamard": True, "scale_granularity": "block", "head_dim": 64}
    yield "fa2", {"parallelism": "batch_heads", "stages": 1}
    yield "fa2", {"tile_q": 256, "tile_kv": 32, "dtype": "fp16", "head_dim": 64, "warps": 8}
    yield "standard", {"softmax": "two_pass", "dtype": "fp16"}
    yield "fa1", {"partition": "split_q", "tile_q": 64, "tile_kv": 64, "parallelism": "query_tiles"}
    yield "fa1", {"loop_order": "q_outer", "normalise": "once", "movement": "cp_async", "warps": 8, "head_dim": 64}
    yield "fa2", {"head_dim": 64, "tile_kv": 16, "tile_q": 16, "warps": 1, "stages": (1, 4), "arch": "sm_80"}


VARIANTS = [(name, tuple(changes.items())) for name, changes in variants()]


@cache
def emitted(name: str, changes: tuple[tuple[str, Any], ...]) -> tuple[Plan, Source]:
    p = plan(*fagen.load(name, **dict(changes)))
    return p, emit(p, name)


def label(variant: tuple[str, tuple[tuple[str, Any], ...]]) -> str:
    return "-".join([variant[0], *(f"{v}" for _, v in variant[1])])


def code_lines(text: str) -> list[str]:
    """Lines without comments, as written."""
    return [x for x in (line.split("//", 1)[0].rstrip() for line in text.splitlines()) if x]


each_variant = pytest.mark.parametrize("variant", VARIANTS, ids=label)


@each_variant
def test_a_finished_text(variant: tuple[str, Any]) -> None:
    """No trace of the template language or of Python, no include, one form of comment, clean lines."""
    _, source = emitted(*variant)
    text = source.text
    for trace in ("{{", "}}", "<%", "%>", "{% ", "{#", "#}", "/*", "*/", "\t", "#include"):
        assert trace not in text, trace
    code = "\n".join(code_lines(text))
    assert not re.search(r"\b(None|True|False|Expr|Const|Sym|undefined)\b", code)
    assert text.endswith("}\n") and not text.startswith("\n") and "\n\n\n" not in text
    assert not [line for line in text.splitlines() if line != line.rstrip()]
    assert text.count("{") == text.count("}") and text.count("(") == text.count(")")


@each_variant
def test_no_variable_hides_another(variant: tuple[str, Any]) -> None:
    """A tile's scalars that are set anew must not be declared anew in an inner block: later steps would read the old ones."""
    _, source = emitted(*variant)
    scopes: list[set[str]] = [set()]
    for line in code_lines(source.text):
        for name in re.findall(r"^\s*(?:const )?(?:int|float|bool|u32|u64) (\w+) =", line):
            assert not any(name in scope for scope in scopes), f"{name} in {line.strip()}"
            scopes[-1].add(name)
        for brace in re.findall(r"[{}]", line):
            if brace == "{":
                scopes.append(set())
            else:
                scopes.pop()


@each_variant
def test_masked_scores_are_minus_infinity(variant: tuple[str, Any]) -> None:
    """Not a large finite number, which scores could undercut."""
    _, source = emitted(*variant)
    assert "#define NEG_INF (__int_as_float(0xff800000))" in source.text
    code = "\n".join(code_lines(source.text))
    assert not re.search(r"FLT_MAX|INFINITY|\b\d+(\.\d*)?e\+?(?:[1-9]\d)\d*f?\b", code), "a large finite constant"
    assert re.search(r"(NEG_INF|-1\.?f? */ *0)", code.split("NEG_INF", 1)[1]), "used somewhere"


@each_variant
def test_no_dead_function(variant: tuple[str, Any]) -> None:
    """Every device function is called, every constant and type is used."""
    _, source = emitted(*variant)
    code = "\n".join(code_lines(source.text))
    defined = re.findall(r"__forceinline__ (?:[\w:]+[ *]+)+?(\w+)\(", code) + re.findall(r"#define (\w+)", code)
    assert len(defined) > 10
    for name in defined:
        assert len(re.findall(rf"\b{name}\b", code)) > 1, f"{name} is never used"


LINES = 135
"""About 120."""
LONG_LINES = 180
"""Of a warpgroup that also issues the loads, joins a tile to the next, or passes over blocks that others see: two programs in one."""
TURNS = 4 * 2 + 2 * 3
"""Of joined tiles whose warpgroups take turns: two for each batch of products, of which a causal tile has four, three for the first and the last turn."""


def role_bodies(p: Plan, text: str) -> dict[str, list[str]]:
    """Lines of each role, from the comment that names it to the next role's or the end."""
    lines = text[text.index('extern "C"') :].splitlines()
    starts = {}
    for role in (r for k in p.kernels for r in k.roles):
        starts[role.name] = next(i for i, line in enumerate(lines) if re.match(rf"\s+// {role.name}: ", line))
    ends = sorted([*starts.values(), len(lines)])
    return {name: lines[i : ends[ends.index(i) + 1]] for name, i in starts.items()}


@each_variant
def test_role_bodies_are_short(variant: tuple[str, Any]) -> None:
    p, source = emitted(*variant)
    for name, lines in role_bodies(p, source.text).items():
        two_in_one = p.schedule.fuse_tiles or p.schedule.skip_masked or p.schedule.mma == "wgmma" and p.schedule.roles == "uniform"
        most = (LONG_LINES if two_in_one else LINES) + TURNS * (p.schedule.fuse_tiles and p.schedule.overlap == "both")
        assert 5 < len(lines) <= most, f"{name}: {len(lines)} lines"


@each_variant
def test_program_loops_are_not_unrolled(variant: tuple[str, Any]) -> None:
    p, source = emitted(*variant)
    body = source.text[source.text.index('extern "C"') :]
    loops = sum(step.kind in ("Loop", "Forever") for k in p.kernels for r in k.roles for step in walk(r.body))
    assert loops == body.count("#pragma unroll 1\n") >= 1
    for k in p.kernels:
        for step in (s for r in k.roles for s in walk(r.body) if isinstance(s, Loop)):
            assert f"[{step.id}]" in body


@each_variant
def test_the_header_tells_all(variant: tuple[str, Any]) -> None:
    """Both values, the shared-memory map, every barrier with its counts, every role with its registers, the loops."""
    p, source = emitted(*variant)
    header = source.text.split("\n\ntypedef", 1)[0]
    assert all(line.startswith("//") for line in header.splitlines())
    assert variant[0] in header and p.id in header and p.attention.label in header
    for value in (p.attention, p.schedule):
        for field, x in value.to_dict().items():
            assert (f"{field}={x}" in header) == (x is not None)
    for k in p.kernels:
        assert f"{k.threads} threads" in header and f"{k.smem_bytes} bytes of shared memory" in header
        for t in k.smem:
            assert re.search(
                rf"//\s+{t.offset}\s+{t.name}\s+{t.stages} ×\s+{t.tile_bytes} B\s+{t.rows} × {t.cols} {t.dtype}", header
            )
        for b in k.mbars:
            assert re.search(rf"//\s+{b.offset}\s+{b.name}\s+{b.stages},\s+{b.arrivals}, {b.tx_bytes}\b", header)
        for n in k.nbars:
            assert f"named barriers {n.first_id} to {n.first_id + n.count - 1}: {n.name}, {n.threads} threads each" in header
        for r in k.roles:
            line = next(x for x in header.splitlines() if x.startswith(f"//   {r.name} ("))
            assert r.registers is None or f"{r.registers} registers" in line
        for step in (s for r in k.roles for s in walk(r.body) if isinstance(s, Loop)):
            assert f"[{step.id}]" in header


@each_variant
def test_barriers_are_initialised_to_the_plans_counts(variant: tuple[str, Any]) -> None:
    p, source = emitted(*variant)
    bars = [b for kernel in p.kernels for b in kernel.mbars]
    init = re.findall(r"i < (\d+); \+\+i\) mbarrier_init\((\w+) \+ 8 \* i, (\d+)\)", source.text)
    assert init == [(str(b.stages), b.name, str(b.arrivals)) for b in bars]
    assert set(re.findall(r"mbarrier_arrive_expect_tx\((\w+)[^,]*, (\d+)\)", source.text[source.text.index('extern "C"') :])) == {
        (b.name, str(b.tx_bytes)) for b in bars if b.tx_bytes
    }


@each_variant
def test_params_hold_pointers_then_wide_then_narrow_scalars(variant: tuple[str, Any]) -> None:
    p, source = emitted(*variant)
    structs = re.findall(r"struct \w*Params \{\n(.*?)\n\};", source.text, re.DOTALL)
    assert len(structs) == len(p.kernels)
    for kernel, members in zip(p.kernels, structs):
        widths = [
            8 if "*" in m else {"i64": 7, "int": 4, "float": 4, "Divisor": 4}[m.split()[0]] for m in members.split(";") if m.strip()
        ]
        assert widths == sorted(widths, reverse=True)  # pointers count as wider than 64-bit scalars
        names = re.findall(r"(\w+);", members + ";")
        assert names == [*kernel.pointers, *(x.name for x in kernel.params)]


@each_variant
def test_the_hash_is_that_of_the_code(variant: tuple[str, Any]) -> None:
    """The rule for evidence: each line without its comment, stripped; empty ones dropped; joined by a newline."""
    _, source = emitted(*variant)
    lines = [line.split("//")[0].strip() for line in source.text.splitlines()]
    assert source.code_sha256 == hashlib.sha256("\n".join(x for x in lines if x).encode()).hexdigest()


def test_the_hash_ignores_comments_blank_lines_and_indentation() -> None:
    base = "int a;\nint b;\n"
    for same in ("// why\nint a;  // the first\n\n\n  int b;\n", "int a;\n//int c;\nint b;", "\tint a;\n\n int b;  \n"):
        assert code_sha256(same) == code_sha256(base)
    for other in ("int a;\nint c;\n", "int a; int b;\n", "int a;\n"):
        assert code_sha256(other) != code_sha256(base)


def test_the_name_stands_in_the_header_only() -> None:
    p = plan(*fagen.load("fa2"))
    a, b = emit(p, "one"), emit(p)
    assert (a.name, b.name) == ("one", p.id) and a.text != b.text
    assert a.code_sha256 == b.code_sha256
    assert a.text.startswith("// one: hd128 bf16 full")


def test_entry_points_and_target_are_the_plans() -> None:
    for variant in VARIANTS[:: len(VARIANTS) // 4]:
        p, source = emitted(*variant)
        assert source.kernels == tuple(k.name for k in p.kernels)
        assert re.findall(r'extern "C" __global__ void __launch_bounds__\((\d+), (\d+)\)\n(\w+)\(', source.text) == [
            (str(k.threads), str(k.min_ctas), k.name) for k in p.kernels
        ]
        assert source.arch == p.schedule.arch


def test_the_scale_is_a_float_constant() -> None:
    for scale, text in ((None, "0.18033688f"), (1.0, "1.44269504f"), (256.0, "369.32993f"), (2.0794415416798357, "3.0f")):
        source = emit(plan(*fagen.load("fa2", head_dim=64, scale=scale)))
        assert f"#define SCALE_LOG2 {text}  //" in source.text


def test_emission_is_the_same_in_every_process(tmp_path: Path) -> None:
    code = (
        "import fagen; from fagen.emit import emit; from fagen.plan import plan\n"
        "for n in ('fa2', 'fa3', 'fa3_fp8'): print(emit(plan(*fagen.load(n, mask='causal', head_dim=64)), n).text)"
    )
    outputs = set()
    for seed in ("0", "1"):
        env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        outputs.add(
            subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout
        )
    here = "".join(emit(plan(*fagen.load(n, mask="causal", head_dim=64)), n).text + "\n" for n in ("fa2", "fa3", "fa3_fp8"))
    assert outputs == {here}


def test_every_template_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """By some schedule, in a release or a debug build, or by what a removal leaves of one."""
    used = set()
    load_template = templates.environment().get_template

    def get_template(name: str, *args: Any, **kwargs: Any) -> Any:
        used.add(name)
        return load_template(name, *args, **kwargs)

    templates._module.cache_clear()
    monkeypatch.setattr(templates.environment(), "get_template", get_template)
    for name, changes in VARIANTS:
        p = fagen.load(name, **dict(changes))
        emit(plan(*p))
        emit(plan(*p, debug=True))
        if p.schedule.precision is None:  # plans that quantise take no marks
            emit(plan(*p, trace=True))
    for removed in ("loads", "pv"):
        emit(without(plan(*fagen.load("fa3")), removed))
    emit(plan_of(64, "bf16", checked_options("block", True, True, 64, 64, None)))
    folder = resource_dir("templates")
    there = {str(path.relative_to(folder)) for path in folder.rglob("*.jinja")}
    assert used == there
