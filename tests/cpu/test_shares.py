"""Measured times beside the predicted ones: what binds by the model, what a removal saves, and whether the two agree."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from results import ROUNDS, result_of, spread

from fagen import InputError, tuned
from fagen.cli import run
from fagen.explore import shares
from fagen.explore.explain import explain, predict
from fagen.library import load
from fagen.plan import Problem, plan
from fagen.plan.removal import without

LONG = Problem(1, 16384, 16384, 16, 16)
LONG64 = Problem(1, 16384, 16384, 32, 32)
LONG_TEXT = "1,16,16,16384,16384"


def what_binds():
    """benchmarks/what_binds.py as a module."""
    path = Path(__file__).parents[2] / "benchmarks" / "what_binds.py"
    spec = importlib.util.spec_from_file_location("what_binds", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# what binds, by schedule and shape ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "head_dim", "problem", "binds"),
    [
        ("fa1", 128, LONG, {"parallelism"}),
        ("standard", 128, LONG, {"hbm"}),
        ("standard", 64, LONG64, {"hbm"}),
        ("standard", 128, Problem(4, 4096, 4096, 16, 16), {"hbm"}),
        ("fa3", 64, LONG64, {"exp", "tensor"}),
        ("fa3", 64, Problem(4, 4096, 4096, 32, 32), {"exp", "tensor"}),
        ("fa3", 128, LONG, {"tensor"}),
        ("fa3", 256, Problem(1, 16384, 16384, 8, 8), {"tensor"}),
    ],
)
def test_explain_says_what_binds(
    name: str, head_dim: int, problem: Problem, binds: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["explain", name, "--set", f"head_dim={head_dim}", "--shape", str(problem), "--no-compile", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["binds"] in binds
    times = answer["times_us"]
    if len(binds) == 2:
        assert abs(times["exp"] / times["tensor"] - 1) < 0.05
    rest = [t for r, t in times.items() if r not in (*binds, "parallelism")]
    assert all(t < 0.95 * times[answer["binds"]] for t in rest)


def test_the_removal_that_takes_most_from_what_binds() -> None:
    """For the cases that benchmarks/what_binds.py times."""
    wanted = {"fa1": ("idle",), "standard": ("softmax",), "fa3.hd64-bf16-full": ("softmax", "pv"), "fa3": ("pv",)}
    script = what_binds()
    for item, p, problem, binds in script.cases():
        cost, names = predict(p, problem), shares.removals_for(p, problem)
        assert ("idle" in names) == (item.name == "fa1")
        assert shares.binding_of(cost)[0] in binds
        left = {n: predict(without(p, n), problem) for n in names}
        assert shares.expected_of(cost, left) == wanted[item.name]


# what a result says -------------------------------------------------------------------------------------------------------


def fa3_result(**ms: float):
    """Times of fa3 on LONG, whole 3 ms, and of what removals leave."""
    whole = plan(*load("fa3"))
    plans = {"fa3": (whole, LONG, spread(3.0))}
    plans |= {f"fa3 without {n}": (without(whole, n), LONG, spread(t)) for n, t in ms.items()}
    return whole, result_of(plans)


def test_shares_pair_the_rounds() -> None:
    whole, result = fa3_result(softmax=2.4, loads=2.97, pv=1.5)
    m = shares.measured(whole, LONG, result, "times.json")
    assert [s.removed for s in m.shares] == ["softmax", "loads", "pv"] and m.ms.median == pytest.approx(3.0)
    by_name = {s.removed: s for s in m.shares}
    for name, saved in (("softmax", 0.2), ("loads", 0.01), ("pv", 0.5)):
        found = by_name[name].saved
        assert found.median == pytest.approx(saved) and found.high - found.low < 1e-9, "drift common to both cancels"
    assert by_name["pv"].removes_us["tensor"] > 0.4 * predict(whole, LONG).times_us["tensor"]
    assert by_name["softmax"].removes_us["exp"] == pytest.approx(predict(whole, LONG).times_us["exp"])
    assert m.most == by_name["pv"] and m.expected == ("pv",) and m.agrees is True and m.binding == ("tensor",)
    plain = m.to_dict()
    assert json.loads(json.dumps(plain)) == plain and plain["most"] == "pv" and 0.7 < plain["bound_share"] < 0.8
    assert explain(whole, problem=LONG, measured=m)["measured"] == plain


def test_a_result_that_speaks_against_the_model_says_so() -> None:
    whole, result = fa3_result(softmax=1.2, loads=2.9, pv=1.5)
    m = shares.measured(whole, LONG, result, "times.json")
    assert m.agrees is False
    text = "\n".join(shares.sentences(m))
    assert "Most is saved without softmax, unlike what the model says: tensor binds, of which P·V takes most." in text
    assert "  without softmax: −60.0 % (−60.0 to −60.0), 1,200 µs" in text
    assert "Measured on NVIDIA H200 (times.json): 3,000 µs (2,99" in text


def test_without_removals_there_is_only_the_time() -> None:
    whole, result = fa3_result()
    m = shares.measured(whole, LONG, result, "times.json")
    assert m.shares == () and m.most is None and m.agrees is None and len(shares.sentences(m)) == 1


def test_a_result_without_the_plan_says_what_it_has() -> None:
    _, result = fa3_result()
    other = plan(*load("fa2"))
    with pytest.raises(InputError, match=r"times.json: has no time of plan .* on 1,16,16,16384,16384; it has fa3 \("):
        shares.measured(other, LONG, result, "times.json")
    with pytest.raises(InputError, match="has no time of plan"):
        shares.measured(plan(*load("fa3")), LONG64, result, "times.json")


def test_the_tuned_table_remembers_its_times() -> None:
    entry = next(e for t in tuned.builtin_tables() for e in t.entries if e.head_dim == 128 and e.measured.problem == LONG_TEXT)
    p = plan(load("fa3", mask=entry.mask).attention, entry.schedule)
    m = shares.recorded(p, LONG)
    assert m is not None and m.ms.confidence == 0 and m.gpu == entry.measured.gpu
    flops = 4 * 128 * 16384**2 * 16 / (2 if entry.mask == "causal" else 1)
    assert m.ms.median == pytest.approx(flops / entry.measured.tflops / 1e9)
    assert "µs; the bound of" in shares.sentences(m)[0], "no interval is claimed"
    assert shares.recorded(p, Problem(1, 1000, 1000, 16, 16)) is None
    assert shares.recorded(plan(*load("fa1")), LONG) is None


# the command --------------------------------------------------------------------------------------------------------------


def test_explain_from_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, result = fa3_result(softmax=2.4, pv=1.5)
    path = tmp_path / "times.json"
    path.write_text(result.to_json())
    assert run(["explain", "fa3", "--no-compile", "--shape", LONG_TEXT, "--from-results", str(path)]) == 0
    text = capsys.readouterr().out
    assert "without P·V: −50.0 %" in text and "as the model says: tensor binds, of which P·V takes most" in text
    assert run(["explain", "fa3", "--no-compile", "--shape", LONG_TEXT, "--from-results", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measured"]["most"] == "pv"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--measure", "--from-results", "x.json"], "--measure: given beside --from-results"),
        (["--from-results", "x.json"], "--from-results: needs --shape"),
        (["--from", "somewhere"], "--from: is about what --measure does"),
        (["--rounds", "3"], "--rounds: is about what --measure does"),
        (["--output", "x.json"], "--output: is about what --measure does"),
        (["--measure", "--rounds", "0"], "--rounds: 0; at least 1"),
        (["--html", "/nowhere/page.html"], "--html: there is no folder /nowhere"),
    ],
)
def test_options_that_do_not_go_together(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "fa3", "--no-compile", *options]) == 2
    assert message in capsys.readouterr().err


def test_without_a_gpu_measuring_says_so_in_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from fagen import LaunchError
    from fagen.explore import bench_lab

    def none() -> None:
        raise LaunchError("no GPU: none here")

    monkeypatch.setattr(bench_lab, "check_device", none)
    assert run(["explain", "fa3", "--measure"]) == 1
    assert capsys.readouterr().err == "fagen: no GPU: none here\n"


def test_measuring_times_the_kernel_and_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From built kernels; the GPU's part is made up, from what the worker was asked for."""
    from fagen.explore import bench_lab, bench_watch

    asked = []

    def run_watched(spec, on_case=None, on_function=None):
        asked.append(spec)
        whole = plan(*load("fa2"))
        plans = {
            k.label: (without(whole, k.without) if k.without else whole, p, spread(2.0 - i / 4))
            for p in [spec.cases[0].problem]
            for i, k in enumerate(spec.cases[0].kernels)
        }
        return result_of(plans)

    monkeypatch.setattr(bench_lab, "check_device", lambda: None)
    monkeypatch.setattr(bench_watch, "run_watched", run_watched)
    assert run(["explain", "fa2", "--measure", "--from", str(tmp_path)]) == 2
    assert "fa2.json: cannot be read" in capsys.readouterr().err
    assert run(["build", "fa2", "--removals", "-o", str(tmp_path)]) == 0
    (tmp_path / "fa2.without-pv.json").rename(tmp_path / "hidden")
    assert run(["explain", "fa2", "--measure", "--from", str(tmp_path)]) == 2
    assert "fa2.without-pv.json: cannot be read" in capsys.readouterr().err and not asked
    (tmp_path / "hidden").rename(tmp_path / "fa2.without-pv.json")
    output = tmp_path / "times.json"
    assert run(["explain", "fa2", "--measure", "--from", str(tmp_path), "--output", str(output), "--rounds", str(ROUNDS)]) == 0
    (spec,) = asked
    (case,) = spec.cases
    assert case.problem == LONG and spec.peers == () and spec.rounds == ROUNDS
    assert [(k.file, k.without) for k in case.kernels] == [
        ("fa2", ""),
        *((f"fa2.without-{n}", n) for n in ("softmax", "loads", "pv")),
    ]
    assert "without softmax: −12.5 %" in capsys.readouterr().out
    assert run(["explain", "fa2", "--shape", LONG_TEXT, "--no-compile", "--from-results", str(output)]) == 0


def test_the_lab_times_what_is_left_unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without something is wrong by design: it is captured as it is, under its own kind; a whole one is judged first."""
    from types import SimpleNamespace

    from fagen.explore import bench_lab
    from fagen.explore.bench_result import CaseSpec, KernelRef

    whole = plan(*load("fa2"))

    class FakeKernel:
        def __init__(self, plan, source, cubin, report):
            self.plan, self.source, self.cubin, self.report = plan, source, cubin, report

        def __call__(self, q, k, v, out, lse):
            return out, lse

        def unload(self) -> None: ...

    monkeypatch.setattr(bench_lab, "Kernel", FakeKernel)
    monkeypatch.setattr(bench_lab, "prediction", lambda kernel, problem: None)
    lab = object.__new__(bench_lab.Lab)
    lab._torch = SimpleNamespace(
        full=lambda *a, **k: "tensor", float32="float32", bfloat16="bf16", cuda=SimpleNamespace(OutOfMemoryError=MemoryError)
    )
    lab._case, lab._doing = None, bench_lab.silent
    lab._check_alive = lambda *_: None  # type: ignore[method-assign]
    lab._judged = lambda row, *_: ("judged", row)  # type: ignore[method-assign, assignment, return-value]
    lab._captured = lambda row, *_: ("captured", row)  # type: ignore[method-assign, assignment, return-value]
    refs = [KernelRef("fa2", "d", "fa2"), KernelRef("fa2 without pv", "d", "fa2.without-pv", without="pv")]
    report = SimpleNamespace(compiler="NVRTC")
    plans = {"fa2": whole, "fa2.without-pv": without(whole, "pv")}
    lab._kernels = {("d", name): FakeKernel(p, "", b"", report) for name, p in plans.items()}  # type: ignore[misc]
    case = CaseSpec(whole.attention, LONG, tuple(refs))
    q = SimpleNamespace(device="cuda")
    (how, row), (how_left, left) = (lab._schedule(case, ref, q, q, q, {}, None) for ref in refs)  # type: ignore[misc, arg-type]
    assert (how, row.kind, row.outcome) == ("judged", "schedule", "failed"), "until it is judged"
    assert (how_left, left.kind, left.outcome, left.error_ratio) == ("captured", "removal", "timed", None)
    assert left.plan_id == f"{whole.id}-without-pv"
