"""diff: what it shows differs, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fagen import InputError
from fagen.cli import run
from fagen.emit import emit
from fagen.explore.diff import changed, code_lines, diff, knobs, program_lines, sass_difference, unified
from fagen.library import load
from fagen.plan import Plan, Problem, plan
from fagen.plan.steps import Mma, walk


def two(first: str, second: str, **changes: object) -> tuple[Plan, Plan]:
    return plan(*load(first)), plan(*load(second, **changes))


def answer(a: Plan, b: Plan, **options: object) -> dict[str, object]:
    return diff(a, b, ("a", "b"), (emit(a, "a"), emit(b, "b")), **options)  # type: ignore[arg-type]


def test_one_knob() -> None:
    a, b = two("fa3", "fa3", overlap="within")
    found = answer(a, b)
    assert json.loads(json.dumps(found)) == found
    assert found["knobs"] == {"overlap": ["both", "within"]}
    removed = [line for line in found["program"] if line.startswith("-")][1:]  # type: ignore[attr-defined]
    assert removed and all("order" in x or "w == " in x for x in removed), "the named barriers, and only they"
    assert not [line for line in found["program"][2:] if line.startswith("+")]  # type: ignore[index]
    assert found["sass"] is None and "times" not in found


def test_knobs_of_both_values() -> None:
    a, b = two("fa2", "fa2", mask="causal", tile_kv=128, stages=(1, 2))
    assert knobs(a, b) == {"mask": ("full", "causal"), "tile_kv": (64, 128), "stages": (2, (1, 2))}
    assert answer(a, b)["knobs"]["stages"] == [2, [1, 2]]  # type: ignore[index]


def test_every_product_stands_in_the_program_with_its_id() -> None:
    p = plan(*load("fa3"))
    lines = program_lines(p)
    for step in walk(p.kernels[0].roles[-1].body):
        if isinstance(step, Mma):
            assert sum(line.endswith(f"[{step.id}]") for line in lines) == 1
    assert lines[0].startswith("kernel attention, 384 threads")


def test_a_reworded_comment_is_no_difference() -> None:
    source = emit(plan(*load("fa2")), "x")
    other = replace(source, text=source.text.replace("// ", "// again: "))
    assert other.text != source.text and unified(code_lines(source), code_lines(other), ("a", "b")) == []
    assert all("//" not in line and line.strip() for line in code_lines(source))


def test_counting_changed_lines() -> None:
    lines = unified(["a", "--b", "c"], ["a", "d", "c", "e"], ("x", "y"))
    assert changed(lines) == (1, 2)
    assert changed([]) == (0, 0)


def test_sass_shows_what_tells_kernels_apart_and_what_differs() -> None:
    a = {"HMMA": 64, "LDGSTS": 0, "HGMMA": 0, "STL": 0, "FFMA": 9, "MUFU": 3}
    b = {"HMMA": 0, "LDGSTS": 0, "HGMMA": 38, "STL": 0, "FFMA": 10, "MUFU": 3}
    assert sass_difference(a, b) == {"HMMA": (64, 0), "HGMMA": (0, 38), "FFMA": (9, 10)}


def test_times_of_both() -> None:
    a, b = two("fa2", "fa3")
    times = answer(a, b, problem=Problem(4, 4096, 4096, 16, 16))["times"]
    assert times["a"]["times_us"]["tensor"] > 1.5 * times["b"]["times_us"]["tensor"]  # type: ignore[index]
    assert times["a"]["binds"] == times["b"]["binds"] == "tensor"  # type: ignore[index]


def test_the_same_kernel_twice() -> None:
    a, _ = two("fa2", "fa2")
    with pytest.raises(InputError, match="b: is the same attention and schedule as a: nothing differs"):
        answer(a, a)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diff", "fa3", "fa3", "--set-b", "overlap=within", "--no-compile", "--shape", "1,16,16,4096,4096"]) == 0
    text = capsys.readouterr().out
    assert "overlap" in text and "[consumer.start.n_arrive_order]" in text and "Machine instructions" not in text
    assert "lines of fa3 are not in fa3." in text and "The tensor cores bind" in text and "@@" in text
    short = len(text.splitlines())
    assert run(["diff", "fa3", "fa3", "--set-b", "overlap=within", "--no-compile", "--source"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > short
    assert run(["diff", "fa2", "fa3", "--no-compile", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["knobs"]["mma"] == ["mma_sync", "wgmma"]
    assert run(["diff", "fa2", "fa2", "--no-compile"]) == 2
    assert "nothing differs" in capsys.readouterr().err


def test_instruction_counts_where_there_is_a_disassembler(capsys: pytest.CaptureFixture[str]) -> None:
    from fagen.sass import nvdisasm

    if nvdisasm() is None:
        pytest.skip("nvdisasm is not installed")
    assert run(["diff", "fa2", "fa3", "--json"]) == 0
    sass = json.loads(capsys.readouterr().out)["sass"]
    assert sass["HMMA"][0] > 0 == sass["HMMA"][1] and sass["HGMMA"][1] > 0 == sass["HGMMA"][0]
