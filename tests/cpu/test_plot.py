"""Pictures and Markdown tables of results: everything measured is in them, and losing rows show."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fagen import Attention, InputError
from fagen.cli import run
from fagen.explore import bench, plot
from fagen.explore.bench_result import BenchResult, CaseResult, Ceilings, Machine, Prediction, Row, Timing
from fagen.explore.series import panels, shape_name
from fagen.explore.table import markdown_table
from fagen.explore.timing import Interval, Reading
from fagen.plan.kernel import Problem

SPEED = {"fa2": 330.0, "fa3": 700.0, "fa3_fp8": 1000.0, "cudnn (torch)": 650.0}


def interval(x: float) -> Interval:
    return Interval(x, 0.99 * x, 1.01 * x, 0.97)


def a_row(name: str, flops: int, best: float | None) -> Row:
    kind = "schedule" if best is not None else "peer"
    ms = flops / SPEED[name] / 1e9
    ratio = interval(SPEED[name] / best) if best else None
    timing = Timing(
        interval(ms), interval(SPEED[name]), SPEED[name], ratio, "cudnn" if ratio else None, 0.9, 0.1, None, (ms,) * 6, 9
    )
    times = dict.fromkeys(("hbm", "tensor", "exp", "parallelism", "latency"), 1.0)
    model = Prediction(times, "tensor", 500 * ms, 1, 1, "The tensor cores bind.") if best is not None else None
    return Row(name, kind, None, None, None, None, "timed", "", 0.5, timing, None, model)


def a_result(grid: str, head_dims: tuple[int, ...], types: tuple[str, ...] = ("bf16",)) -> BenchResult:
    cases = []
    for d in head_dims:
        for mask in ("causal", "full"):
            for dtype in types:
                attention = Attention(head_dim=d, mask=mask, dtype=dtype)
                for problem in bench.grid_problems(grid, d):
                    flops = bench.flops(attention, problem)
                    if dtype == "bf16":
                        rows = (a_row("fa2", flops, 650.0), a_row("fa3", flops, 650.0), a_row("cudnn (torch)", flops, None))
                    else:
                        absent = Row(
                            "cudnn (torch)", "peer", "cudnn", None, None, None, "absent", "takes no e4m3", None, None, None, None
                        )
                        rows = (a_row("fa3_fp8", flops, 0.0), absent)
                    cases.append(CaseResult(attention, problem, flops, flops, 1, Reading(), Reading(), rows))
    machine = Machine("NVIDIA H200", "9.0", 132, 1 << 37, None, None, None, "none")
    ceilings = Ceilings(interval(780.0), interval(4.3), None, None, {"add": 4.3})
    return BenchResult(2, "2026-01-02T03:04:05+00:00", 1.0, machine, {}, bench.METHOD, 6, 0, ceilings, tuple(cases))


LADDER = a_result("ladder", (128,), ("bf16", "e4m3"))


def test_panels() -> None:
    full, causal = panels(LADDER)
    assert (full.mask, causal.mask) == ("full", "causal")
    assert [(s.name, s.kind) for s in full.series] == [
        ("fa2", "schedule"),
        ("fa3", "schedule"),
        ("fa3_fp8 e4m3", "schedule"),
        ("cudnn (torch)", "peer"),
    ], "schedules first; a peer that was never timed in a type is no line"
    assert [shape_name(p) for p in full.problems] == ["16 × 1k", "16 × 2k", "16 × 4k", "4 × 4k", "1 × 16k"]
    assert full.series[1].tflops == (700.0,) * 5
    assert [p.head_dim for p in panels(a_result("paper", (256, 64)))] == [64, 64, 256, 256]
    assert shape_name(Problem(2, 100, 3000, 8, 2)) == "2,8,2,100,3000"


def test_the_markdown_table_marks_what_loses() -> None:
    text = markdown_table(LADDER)
    assert text.count("| `fa2` | 330 (**0.51**) | 330 (**0.51**) |") == 2, "full and causal"
    assert (
        "| `fa3` | 700 (1.08) |" in text and "| cudnn (torch) | 650 | 650 |" in text and "| `fa3_fp8 e4m3` | 1000 | 1000 |" in text
    )
    assert "- `fa3` (head_dim 128, full, 1 × 16k): The tensor cores bind. It reaches 50 % of that." in text
    assert "- cudnn (torch) on hd128 e4m3 full was not timed (absent): takes no e4m3" in text
    assert "matrix product 780 TFLOP/s, copy 4.30 TB/s" in text
    shapes, means = text.split("| relative to the best peer |")
    rows = [line for line in shapes.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {7}, "every row of a table has a cell for every shape"
    assert "| `fa3`, burst | hd128 bf16 full | 5 | 1.077 | 1.077 (16,16,16,1024,1024) | 0 | 90 % |" in means
    assert "| `fa2`, burst | all bf16 | 10 | 0.508 | 0.508 (hd128 bf16 causal 16,16,16,1024,1024) | 10 | 90 % |" in means
    assert "fa3_fp8`, burst" not in means, "no peer, no ratio"


def test_a_ratio_just_below_one_does_not_read_as_one() -> None:
    SPEED["fa2"] = 648.5
    try:
        assert "648 (**0.9977**)" in markdown_table(a_result("ladder", (128,)))
    finally:
        SPEED["fa2"] = 330.0


def test_the_ladder_has_two_panels_and_a_gap_between_its_halves() -> None:
    figure = plot.draw(LADDER)
    full, causal = figure.axes
    assert full.get_title(loc="left") == "head_dim 128, full" and causal.get_title(loc="left") == "head_dim 128, causal"
    lines = [line for line in full.get_lines() if "fa3" in line.get_label() and "fp8" not in line.get_label()]
    assert [list(line.get_xdata()) for line in lines] == [[0, 1, 2], [3, 4]], "16 sequences, then 16384 tokens"
    assert all(set(line.get_ydata()) == {700.0} for line in lines)
    assert [t.get_text() for t in full.get_xticklabels()] == ["1k\n× 16", "2k\n× 16", "4k\n× 16", "4k\n× 4", "16k\n× 1"]
    assert full.get_ylim()[0] == 0
    (legend,) = figure.legends
    assert [t.get_text() for t in legend.get_texts()] == ["fa2", "fa3", "fa3_fp8 e4m3", "cudnn (torch)"]
    assert {t.get_text() for t in full.texts} == {"330", "700", "1000"}, "values of schedules at their last point"


def test_the_papers_grid_is_a_row_for_each_mask_and_a_column_for_each_head_dim() -> None:
    figure = plot.draw(a_result("paper", (64, 128, 256)))
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert titles == [f"head_dim {d}, {mask}" for mask in ("full", "causal") for d in (64, 128, 256)]
    assert all(len(ax.get_lines()[0].get_xdata()) == 6 for ax in figure.axes), "one line through all lengths"


def test_lines_are_told_apart_without_colour() -> None:
    looks = plot._looks(list(panels(LADDER)))
    shapes = [(look["marker"], look.get("linestyle", "-")) for look in looks.values()]
    assert len(set(shapes)) == len(shapes) and len({look["color"] for look in looks.values()}) == len(looks)


def test_the_picture_is_written_alike_every_time(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        plot.write_plot(LADDER, tmp_path / name)
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text() and text.lstrip().startswith("<?xml")
    plot.write_plot(LADDER, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, picture = tmp_path / "r.json", tmp_path / "p.svg"
    results.write_text(LADDER.to_json())
    assert plot.main([str(results), str(picture)]) == 0 and picture.stat().st_size > 10000
    picture.unlink()
    assert run(["bench", "--from-results", str(results), "--plot", str(picture), "--markdown"]) == 0
    assert picture.exists() and capsys.readouterr().out.strip() == markdown_table(LADDER)
    assert run(["bench", "--from-results", str(results), "--json"]) == 0
    assert BenchResult.from_json(capsys.readouterr().out) == LADDER
    assert run(["bench", "--from-results", str(results)]) == 0
    text = capsys.readouterr().out
    assert "hd128 bf16" in text and re.search(r" fa3 .*1\.077 of cudnn .*tensor 50", text)
    results.write_text("{}")
    assert run(["bench", "--from-results", str(results)]) == 2
    assert "is not a result of this version: BenchResult: lacks" in capsys.readouterr().err
    assert plot.main([str(results), str(picture)]) == 2 and plot.main([]) == 2


def test_nothing_to_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = tuple(c for c in LADDER.cases if c.attention.dtype == "e4m3")
    only = [CaseResult(c.attention, c.problem, 1, 1, 1, c.before, c.after, c.rows[1:]) for c in absent]
    with pytest.raises(InputError, match="nothing was timed"):
        plot.write_plot(replace(LADDER, cases=tuple(only)), tmp_path / "x.svg")
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'fagen\[plot\]'"):
        plot.write_plot(LADDER, tmp_path / "x.svg")
