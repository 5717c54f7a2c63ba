"""diff: what it shows differs, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from results import result_of, spread

from fagen import InputError
from fagen.cli import run
from fagen.emit import emit
from fagen.explore.diff import changed, code_lines, diff, knobs, measured_times, program_lines, sass_difference, unified
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


def test_a_setting_of_b_stands_in_for_that_of_both(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--set", "tile_kv=128", "--set", "overlap=within", "--set-b", "tile-kv=64", "--no-compile", "--json"]
    assert run(["diff", "fa3", "fa3", *given]) == 0
    assert json.loads(capsys.readouterr().out)["knobs"] == {"tile_kv": [128, 64]}
    assert run(["diff", "fa3", "fa3", "--causal", "--set-b", "mask=full", "--no-compile", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["knobs"] == {"mask": ["causal", "full"]}
    assert run(["diff", "fa3", "fa3", "--set-b", "tile_kv=64", "--set-b", "tile_kv=96", "--no-compile"]) == 2
    assert "--set-b: tile_kv is given twice" in capsys.readouterr().err
    assert run(["diff", "fa3", "fa3", "--set-b", "tile_kw=64", "--no-compile"]) == 2
    assert "--set-b: no knob 'tile_kw' in an attention or a schedule; did you mean tile_kv" in capsys.readouterr().err


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


# measured times -----------------------------------------------------------------------------------------------------------

LONG = Problem(1, 16384, 16384, 16, 16)


def test_measured_times_stand_beside_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = two("fa2", "fa3")
    result = result_of({"fa2": (a, LONG, spread(6.0)), "fa3": (b, LONG, spread(3.0))})
    found = measured_times(a, b, LONG, result, "times.json")
    assert found["a"]["ms"]["median"] == pytest.approx(6.0) and found["b"]["source"] == "times.json"
    assert found["speedup"]["median"] == pytest.approx(2.0) and found["speedup"]["high"] - found["speedup"]["low"] < 1e-9
    path = tmp_path / "times.json"
    path.write_text(result.to_json())
    command = ["diff", "fa2", "fa3", "--no-compile", "--shape", "1,16,16,16384,16384", "--from-results", str(path)]
    assert run(command) == 0
    text = capsys.readouterr().out
    assert "fa3 is 2.000 times as fast as fa2 (2.000 to 2.000)." in text and "measured" in text
    assert run([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measured"]["speedup"]["median"] == pytest.approx(2.0)
    assert run(["diff", "fa2", "fa3", "--no-compile", "--from-results", str(path)]) == 2
    assert "--from-results: needs --shape" in capsys.readouterr().err


def test_a_difference_in_the_noise_is_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = two("fa3", "fa3", overlap="within")
    path = tmp_path / "times.json"
    path.write_text(result_of({"a": (a, LONG, spread(3.0)), "b": (b, LONG, spread(3.0, noise=-0.004))}).to_json())
    options = ["--set-b", "overlap=within", "--no-compile", "--shape", "1,16,16,16384,16384", "--from-results", str(path)]
    assert run(["diff", "fa3", "fa3", *options]) == 0
    assert "within noise" in capsys.readouterr().out


def test_a_file_that_has_one_or_none_of_both() -> None:
    a, b = two("fa2", "fa3")
    found = measured_times(a, b, LONG, result_of({"fa3": (b, LONG, spread(3.0))}), "times.json")
    assert found["a"] is None and found["b"] is not None and "speedup" not in found
    with pytest.raises(InputError, match=r"times\.json: has no time of plan"):
        measured_times(a, b, Problem(1, 512, 512, 1, 1), result_of({"fa3": (b, LONG, spread(3.0))}), "times.json")
