"""`fagen check --accuracy`: what the rows are, that pieces of a problem are the problem, and what the table says of right and wrong numbers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fagen import Attention, InputError, LaunchError, accuracy, npz
from fagen.accuracy import gpu as on_gpu
from fagen.accuracy import run
from fagen.accuracy.recipes import INT8_QK_WAYS, INT8_WAYS, PROMOTIONS, WAYS
from fagen.accuracy.run import MOST_SCORES, OnGpu, PeerRow, _rows_by_head
from fagen.accuracy.table import agreement, best
from fagen.accuracy.tensors import Part, given, in_half, parts, with_outliers
from fagen.accuracy.truth import standard, truth
from fagen.cli import accuracy as command
from fagen.cli import run as fagen_run
from fagen.explore import peers
from fagen.library import load
from fagen.oracle import cast, reference, simulate
from fagen.oracle.quantise import GRANULARITIES
from fagen.plan.kernel import Problem

LABELS = [*(w.label for w in WAYS), *(f"int8 {w.label}" for w in INT8_WAYS), *(f"int8_qk {w.label}" for w in INT8_QK_WAYS)]
SMALL = Problem(2, 400, 700, 4, 2)
TINY = Problem(2, 200, 420, 2, 1)
"""Of tables: quick, and still several tiles, blocks and heads."""


def trial(problem: Problem = TINY, names: tuple[str, ...] = ("fa3", "fa3_fp8"), seed: int = 0, **changes: Any) -> accuracy.Trial:
    source = accuracy.RandomSource(problem, 64, seed)
    rows = [(n, r) for n in names for r in accuracy.recipes(*load(n, head_dim=64, **changes), source.dtype)]
    return accuracy.Trial("small", source, tuple(rows))


@pytest.fixture(scope="module", autouse=True)
def predictions_once() -> Iterator[None]:
    """The simulator is asked once for each piece of a problem, however many tables are made of it."""
    known: dict[Any, Any] = {}
    simulated = run.predict

    def predict(recipe: accuracy.Recipe, inputs: Any) -> Any:
        key = recipe, *(x.tobytes() for x in (inputs.q, inputs.k, inputs.v))
        if key not in known:
            known[key] = simulated(recipe, inputs)
        return known[key]

    with pytest.MonkeyPatch.context() as m:
        m.setattr(run, "predict", predict)
        yield


@pytest.fixture(scope="module")
def predicted() -> accuracy.AccuracyResult:
    return accuracy.run_trials([trial()], seed=0)


def by_recipe(result: accuracy.AccuracyResult) -> dict[str, accuracy.AccuracyRow]:
    (e,) = result.experiments
    return {r.recipe: r for r in e.rows}


# rows ---------------------------------------------------------------------------------------------------------------------


def test_a_16_bit_schedule_has_one_row_and_an_e4m3_one_a_row_for_each_way() -> None:
    (row,) = accuracy.recipes(*load("fa3"), "fp16")
    assert (row.label, row.attention.dtype, row.quantiser, row.refused) == ("fp16", "fp16", None, "")
    rows = accuracy.recipes(*load("fa3_fp8"), "fp16")
    assert [r.label for r in rows] == LABELS
    assert not any(r.refused for r in rows)
    products = ["e4m3"] * len(WAYS) + ["int8"] * len(INT8_WAYS) + ["int8_qk"] * len(INT8_QK_WAYS)
    assert [r.attention.products for r in rows] == products
    assert {r.attention.output_dtype for r in rows[: -len(INT8_QK_WAYS)]} == {"bf16"}
    assert {(r.attention.value_dtype, r.attention.output_dtype) for r in rows[-len(INT8_QK_WAYS) :]} == {("fp16", "fp16")}
    same = load("fa3_fp8", dtype="int8")
    assert accuracy.recipes(*same, "fp16") == rows, "whichever of the two the schedule is loaded for"
    for way, r in zip((*WAYS, *INT8_WAYS, *INT8_QK_WAYS), rows):
        assert r.quantiser is not None
        assert r.quantiser.dtype == r.attention.dtype
        assert r.quantiser.v_dtype == (None if r.attention.products == "int8_qk" else "e4m3")
        assert r.schedule.scale_granularity == r.quantiser.granularity == way.granularity
        assert (r.quantiser.hadamard, r.quantiser.smooth_k) == (way.hadamard, way.smooth_k)
        if way.granularity == "block":
            assert (r.quantiser.tile_q, r.quantiser.tile_kv) == (r.schedule.tile_q, r.schedule.tile_kv)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_with_promotion_share_blocks_that_leave_room_for_it(head_dim: int) -> None:
    attention, schedule = load("fa3_fp8", head_dim=head_dim)
    rows = accuracy.long_recipes(attention, schedule, "fp16")
    assert [r.schedule.promote_every for r in rows] == list(PROMOTIONS) and not any(r.refused for r in rows)
    assert len({r.schedule.tile_kv for r in rows}) == 1 and rows[0].schedule.tile_kv <= schedule.tile_kv


def test_no_room_for_promotion_is_said() -> None:
    """At head_dim 256 O and its copy alone are all registers."""
    never, *promoted = accuracy.long_recipes(*load("fa3_fp8", head_dim=256), "fp16")
    assert not never.refused and all("[registers]" in r.refused for r in promoted)


def test_what_a_plan_refuses_is_a_row_with_the_reason() -> None:
    attention, schedule = load("fa3_fp8")
    (row, *_) = accuracy.recipes(attention, schedule.replace(stages=4, tile_q=192), "fp16")
    assert row.refused.startswith("[")
    t = accuracy.Trial("refused", accuracy.RandomSource(SMALL, 128, 0), (("mine", row),))
    (e,) = accuracy.run_trials([t], seed=0).experiments
    assert [r.outcome for r in e.rows] == ["right", "refused"] and e.rows[1].reason == row.refused


# tensors ------------------------------------------------------------------------------------------------------------------


def test_outliers_are_those_of_the_paper() -> None:
    x = with_outliers(np.random.default_rng(0), (1, 2000, 10, 64)).astype(float)
    assert abs(x.std() - (1 + 0.1) ** 0.5) < 0.01 and abs(x.mean()) < 0.01
    assert 0.0003 < (np.abs(x) > 5).mean() < 0.001 and np.abs(x).max() > 25


def test_v_may_have_a_mean() -> None:
    plain, shifted = (accuracy.RandomSource(SMALL, 64, 3, mean).tensors() for mean in (0.0, 1.0))
    np.testing.assert_array_equal(shifted[1], plain[1])
    np.testing.assert_array_equal(shifted[2], plain[2] + np.float32(1))


def test_the_command_takes_the_paper_and_long_keys_unless_told_otherwise() -> None:
    items = command.select(["fa3_fp8"], (), False)
    found = command.trials(items, command.Options())
    assert [t.title for t in found] == ["outliers", "32k keys", "32k keys, V around 1", "128k keys", "128k keys, V around 1"]
    assert found[0].source == accuracy.RandomSource(Problem(2, 4096, 4096, 16, 16), 128, 0)
    assert [len(t.recipes) for t in found] == [len(LABELS), *[len(PROMOTIONS)] * 4]
    kernels = command.kernels(found)
    assert len(kernels) == len({k.name for k in kernels}) == 3 + 2 + 2 + len(PROMOTIONS)


def test_a_source_gives_the_same_tensors_again_and_kernels_get_them_in_16_bits() -> None:
    source = accuracy.RandomSource(SMALL, 64, 3)
    for a, b, c in zip(source.tensors(), accuracy.RandomSource(SMALL, 64, 3).tensors(), in_half(source)):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == np.float32 and c.dtype == np.float16
        np.testing.assert_array_equal(c, a.astype(np.float16))
    assert not np.array_equal(source.tensors()[0], accuracy.RandomSource(SMALL, 64, 4).tensors()[0])


def test_parts_are_pieces_of_heads_in_order() -> None:
    found = parts(SMALL, 192, 1000, 0)
    assert len(found) == 2 * 4 * 3 and found == tuple(sorted(found, key=dataclasses.astuple))
    assert {(p.first, p.last) for p in found} == {(0, 192), (192, 384), (384, 400)}
    few = parts(SMALL, 192, 5, 0)
    assert len(few) == 5 and set(few) < set(found) and few == parts(SMALL, 192, 5, 0) != parts(SMALL, 192, 5, 1)


def test_every_row_gets_a_reference_unless_there_are_too_many() -> None:
    pieces = (Part(0, 1, 5, 9),)
    assert {at: list(r) for at, r in _rows_by_head(SMALL, pieces, None).items()} == {(0, 1): [5, 6, 7, 8]}
    everything = _rows_by_head(SMALL, pieces, 0)
    assert len(everything) == 8 and all(len(r) == 400 for r in everything.values())
    huge = Problem(1, 1 << 16, 1 << 17, 2, 2)
    sampled = _rows_by_head(huge, pieces, 0)
    assert len(sampled[0, 0]) == MOST_SCORES // (2 << 17) and set(range(5, 9)) <= set(sampled[0, 1].tolist())


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("label", [x for x in LABELS if "smooth" not in x])
def test_a_part_of_a_problem_is_the_problem_bit_for_bit(label: str, mask: str) -> None:
    t = trial(SMALL, ("fa3_fp8",), mask=mask)
    (_, recipe) = next(r for r in t.recipes if r[1].label == label)
    inputs = given(recipe.quantiser, recipe.attention, *in_half(t.source))
    out, lse = simulate(recipe.attention, recipe.schedule, inputs.q, inputs.k, inputs.v, **inputs.descales)
    for p in parts(SMALL, recipe.schedule.tile_q, 4, 0):
        piece = inputs.part(p, recipe.schedule.tile_q, recipe.schedule.tile_kv, mask == "causal")
        mine, mine_lse = simulate(recipe.attention, recipe.schedule, piece.q, piece.k, piece.v, **piece.descales)
        np.testing.assert_array_equal(mine[0, :, 0], out[p.batch, p.first : p.last, p.head])
        np.testing.assert_array_equal(mine_lse[0, 0], lse[p.batch, p.head, p.first : p.last])


# truth --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_standard_attention_rounds_scores_and_p(mask: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (cast(rng.standard_normal((1, n, 1, 64)).astype(np.float32), "fp16") for n in (40, 30, 30))
    attention = Attention(head_dim=64, dtype="fp16", mask=mask)
    half = np.float16
    s = (
        (q[0, :, 0].astype(np.float32) @ k[0, :, 0].astype(np.float32).T).astype(half).astype(np.float32) * np.float32(0.125)
    ).astype(half)
    if mask == "causal":
        s = np.where(np.arange(30) <= np.arange(40)[:, None] - 10, s, half(-np.inf))
    seen = slice(10, None) if mask == "causal" else slice(None)
    p = np.exp(s[seen].astype(np.float32) - s[seen].max(axis=1, keepdims=True))
    want = ((p / p.sum(axis=1, keepdims=True)).astype(half).astype(np.float32) @ v[0, :, 0].astype(np.float32)).astype(half)
    rows = np.arange(40)
    got = standard(attention, q, k, v, rows)[0, :, 0]
    np.testing.assert_allclose(got[seen], want.astype(float), atol=2**-11)
    assert not got[: 40 - len(want)].any()
    t = truth(attention, q, k, v, rows[::3])
    out, lse = reference(attention, q, k, v)
    np.testing.assert_array_equal(t.out, out[0, ::3, 0])
    np.testing.assert_array_equal(t.lse, lse[0, 0, ::3])
    np.testing.assert_array_equal(t.standard, got[::3])
    assert t.standard_e4m3 is None
    coarse = truth(attention, q, k, v, rows, (q, k, v)).standard_e4m3
    p8 = cast((p / p.sum(axis=1, keepdims=True)).astype(half), "e4m3").astype(np.float32)
    np.testing.assert_allclose(coarse[seen], (p8 @ v[0, :, 0].astype(np.float32)).astype(half), atol=2**-6)


# predictions --------------------------------------------------------------------------------------------------------------


def test_predictions_of_the_simulator(predicted: accuracy.AccuracyResult) -> None:
    rows = by_recipe(predicted)
    assert predicted.ok and all(r.outcome == "right" and r.measured is None and r.sampled is None for r in rows.values())
    rmse = {label: r.predicted.rmse for label, r in rows.items() if r.predicted is not None}
    half, plain = rmse["fp16"], rmse["per tensor"]
    assert plain < rmse["e4m3 per tensor; scores and out in fp16, P in e4m3"]
    assert half < rmse["scores, P and out in fp16"] < plain / 10, rmse
    for granularity in GRANULARITIES:
        assert rmse[f"per {granularity}, Hadamard"] < 0.85 * rmse[f"per {granularity}"], rmse
    assert all(r.predicted and r.predicted.rmse_lse and r.predicted.rmse_lse < 0.5 for r in rows.values() if r.kind == "schedule")


def test_one_large_column_is_what_the_rotation_is_for() -> None:
    """Query and key share a column 30 times larger than the rest: most of the range of e4m3 is spent on it, and most of its error."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, 1, 64)).astype(np.float32) for n in (192, 800, 800))
    q[..., 7], k[..., 7] = 12 * np.sign(q[..., 7]), 12 + rng.standard_normal(k.shape[:3]).astype(np.float32)
    want, _ = reference(Attention(head_dim=64), q, k, v)
    errors = {}
    for recipe in accuracy.recipes(*load("fa3_fp8", head_dim=64), "fp16"):
        inputs = given(recipe.quantiser, recipe.attention, *(cast(x, "fp16") for x in (q, k, v)))
        out, _ = simulate(recipe.attention, recipe.schedule, inputs.q, inputs.k, inputs.v, **inputs.descales)
        errors[recipe.label] = float(np.sqrt(np.mean((out.astype(float) - want) ** 2)))
    assert errors["per block, Hadamard"] < 0.4 * errors["per tensor"], errors
    assert errors["per block, Hadamard, smooth K"] < 0.4 * errors["per tensor"], errors


def test_the_same_seed_gives_the_same_table(predicted: accuracy.AccuracyResult) -> None:
    again = accuracy.run_trials([trial()], seed=0)
    assert again.experiments == predicted.experiments
    small = [trial(Problem(1, 64, 100, 1, 1), ("fa3",), seed=s) for s in (0, 1)]
    assert len({accuracy.run_trials([t], seed=0).experiments[0].rows for t in small}) == 2


def test_the_result_survives_json(predicted: accuracy.AccuracyResult) -> None:
    assert accuracy.AccuracyResult.from_json(predicted.to_json()) == predicted


def test_rows_must_compute_the_same() -> None:
    mixed = dataclasses.replace(trial(), recipes=trial().recipes[:1] + trial(mask="causal").recipes[1:])
    with pytest.raises(InputError, match="one head_dim, mask and scale"):
        accuracy.run_trials([mixed], seed=0)
    with pytest.raises(InputError, match="nothing to compare"):
        accuracy.run_trials([trial(Problem(1, 0, 5, 1, 1))], seed=0)


def test_promotion_is_for_long_sums_of_one_sign() -> None:
    """V around 1: without promotion the sum of 8192 keys is so large that what joins it is cut off, by half and more of it."""
    recipes = accuracy.long_recipes(*load("fa3_fp8", head_dim=64), "fp16")
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, 1, 64)).astype(np.float32) + shift for n, shift in ((64, 0), (8192, 0), (8192, 1)))
    want, _ = reference(Attention(head_dim=64), q, k, v)
    rmse = []
    for r in recipes:
        inputs = given(r.quantiser, r.attention, *(cast(x, "fp16") for x in (q, k, v)))
        out, _ = simulate(r.attention, r.schedule, inputs.q, inputs.k, inputs.v, exact_sums=True, **inputs.descales)
        rmse.append(float(np.sqrt(np.mean((out.astype(float) - want) ** 2))))
    never, rarely, always = rmse
    assert always < rarely < never / 4 and always < 0.01 < 0.03 < never, rmse


# measurements -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outputs() -> list[accuracy.Measured]:
    """What a GPU that agrees with the simulator gives for the rows of `trial`."""
    t = trial()
    found = []
    for _, r in t.recipes:
        inputs = given(r.quantiser, r.attention, *in_half(t.source))
        out, lse = simulate(r.attention, r.schedule, inputs.q, inputs.k, inputs.v, exact_sums=True, **inputs.descales)
        found.append(accuracy.Measured(out, lse if inputs.shift is None else lse + inputs.shift))
    return found


def measured(outputs: list[accuracy.Measured], peer: accuracy.Measured | None = None) -> accuracy.AccuracyResult:
    row = PeerRow("fa3 (fa3-fwd)", "per tensor", Attention(head_dim=64, dtype="e4m3"), None)
    rows = [] if peer is None else [(row, peer)]
    return accuracy.run_trials([trial()], seed=0, measured=[OnGpu(outputs, rows)], gpu="a GPU", driver="1", versions={"torch": "2"})


def test_a_gpu_that_does_as_predicted_is_right(outputs: list[accuracy.Measured]) -> None:
    result = measured(outputs, outputs[1])
    (e,) = result.experiments
    assert result.ok and all(r.outcome == "right" for r in e.rows)
    for r in e.rows:
        assert r.measured is not None and r.measured.rows == 2 * 2 * 200
        if r.kind == "schedule":
            assert agreement(r) == pytest.approx(1.0)
    peer = e.rows[-1]
    assert (peer.kind, peer.predicted) == ("peer", None) and peer.measured == e.rows[3].measured


def test_a_gpu_that_errs_more_than_predicted_is_off(outputs: list[accuracy.Measured]) -> None:
    noise = 0.02 * np.random.default_rng(0).standard_normal(outputs[1].out.shape)
    worse = [outputs[0], dataclasses.replace(outputs[1], out=outputs[1].out.astype(np.float32) + noise), *outputs[2:]]
    result = measured(worse)
    (off,) = [r for e in result.experiments for r in e.rows if r.outcome != "right"]
    assert (off.recipe, off.outcome, result.ok) == ("per tensor", "off", False) and "predicted" in off.reason


def test_nan_is_wrong_and_the_table_can_still_be_written(outputs: list[accuracy.Measured]) -> None:
    out = outputs[3].out.astype(np.float32)
    out[1, 199, 1, 0] = np.nan
    result = measured([*outputs[:3], dataclasses.replace(outputs[3], out=out), *outputs[4:]])
    (wrong,) = [r for e in result.experiments for r in e.rows if r.outcome != "right"]
    assert (wrong.recipe, wrong.outcome, wrong.measured, result.ok) == ("per block", "wrong", None, False)
    assert "NaN" in accuracy.markdown_table(result) and json.loads(result.to_json())["gpu"] == "a GPU"


def test_a_peer_that_is_not_there_says_so(outputs: list[accuracy.Measured]) -> None:
    result = measured(outputs, accuracy.Measured(None, None, "not installed"))
    assert result.ok and by_recipe(result)["per tensor"].outcome == "absent"
    assert "fa3 (fa3-fwd), per tensor: absent: not installed" in accuracy.markdown_table(result)


def test_tables_name_the_best_way(predicted: accuracy.AccuracyResult, outputs: list[accuracy.Measured]) -> None:
    (e,) = predicted.experiments
    rmse = {r.recipe: r.predicted.rmse for r in e.rows if r.quantiser and r.predicted}
    least = min(rmse, key=lambda label: rmse[label])
    naive = next(r.predicted.rmse for r in e.rows if "P in e4m3" in r.recipe and r.predicted)
    ratios = f"{rmse[least] / rmse['per tensor']:.2f} of per tensor, {rmse[least] / naive:.2f} of standard attention in e4m3"
    assert best(e) == [f"fa3_fp8: best is {least}, {ratios}."]
    text = accuracy.markdown_table(predicted)
    assert "Predicted by the simulator" in text and f"| `fa3_fp8` | per tensor | {rmse['per tensor']:.2e} | 1.00 |" in text
    told = accuracy.markdown_table(measured(outputs))
    assert "Measured on a GPU, driver 1, torch 2" in told and told.count("| 1.000 |") == len(outputs)


# the worker on the GPU, without one ---------------------------------------------------------------------------------------


class FakeKernel:
    def __init__(self, plan: Any, *_: Any):
        self.plan = plan

    def __call__(self, q: Any, k: Any, v: Any, *, out: Any, lse: Any, **descales: Any) -> None:
        out[...], lse[...] = simulate(self.plan.attention, self.plan.schedule, q, k, v, exact_sums=True, **descales)

    def unload(self) -> None:
        pass


class FakeWorker:
    """Runs the task at once, in this process."""

    def __init__(self, task: str, request: dict[str, Any]):
        assert task == "fagen.accuracy.gpu:serve"
        self._request, self.sent = json.loads(json.dumps(request)), []

    def __enter__(self) -> FakeWorker:
        on_gpu.serve(self._request, self)  # type: ignore[arg-type]
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def doing(self, what: str, seconds: float) -> None:
        assert what and seconds > 0

    def send(self, kind: str, **fields: Any) -> None:
        self.sent.append({"kind": kind, **fields})

    def messages(self) -> Any:
        return self.sent


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Info:
        name, driver_version = "a GPU", (13, 0)

    monkeypatch.setattr(on_gpu.driver, "current_device", lambda: 0)
    monkeypatch.setattr(on_gpu.driver, "device_info", lambda device: Info())
    monkeypatch.setattr(on_gpu.guard, "Watched", FakeWorker)
    monkeypatch.setattr(on_gpu, "Kernel", FakeKernel)
    monkeypatch.setattr(command.common, "choose_device", lambda asked: "gpu")


def test_the_command_on_a_gpu(
    fake_gpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--set", "head_dim=64", "--accuracy", "--shape", "1,2,1,100,200"]
    assert fagen_run(["build", "fa3", "fa3_fp8", *options, "-o", "built"]) == 0
    capsys.readouterr()
    assert fagen_run(["check", "fa3", "fa3_fp8", *options, "--from", "built", "--json", "--output", "a.json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == json.loads(Path("a.json").read_text()) and shown["gpu"] == "a GPU"
    (e,) = accuracy.AccuracyResult.from_json(Path("a.json").read_text()).experiments
    ours = [r for r in e.rows if r.kind == "schedule"]
    assert len(ours) == 1 + len(LABELS) and all(agreement(r) == pytest.approx(1.0, abs=1e-6) for r in ours)
    theirs = [r for r in e.rows if r.kind == "peer"]
    assert [r.recipe for r in theirs] == ["fp16", "per tensor", "per head, Hadamard"]
    assert all(r.outcome == "absent" and r.reason for r in theirs)


def test_the_peer_gets_bits_and_descales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a torch that is made of NumPy: what reaches the peer stands for the tensors."""
    t = trial(names=("fa3_fp8",))
    q, k, v = in_half(t.source)
    seen: dict[str, Any] = {}

    class Tensor:
        def __init__(self, x: Any):
            self.x = x

        def cuda(self) -> Tensor:
            return self

        cpu = contiguous = cuda

        def view(self, kind: Any) -> Tensor:
            return Tensor(self.x.view(kind))

        def numpy(self) -> Any:
            return self.x

    class Torch:
        import ml_dtypes

        float16, bfloat16, float8_e4m3fn, int16 = np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int16
        from_numpy = Tensor

    def prepare(name: str, torch: Any, attention: Attention, q: Any, k: Any, v: Any, descales: dict[str, Any]) -> tuple[Any, Any]:
        seen.update(q=q.x, k=k.x, v=v.x, **{n: d.x for n, d in descales.items()})
        return None, Tensor(np.zeros(q.x.shape, ml_dtypes_bf16))

    import ml_dtypes

    ml_dtypes_bf16 = ml_dtypes.bfloat16
    monkeypatch.setattr(peers, "prepare", prepare)
    quantiser = dataclasses.asdict(next(r.quantiser for _, r in t.recipes if r.label == "per tensor"))
    out = on_gpu._peer(Torch, Attention(head_dim=64, dtype="e4m3"), quantiser, q, k, v)
    assert out.shape == q.shape and out.dtype == ml_dtypes.bfloat16
    for n, x in (("q", q), ("k", k), ("v", v)):
        assert seen[n].dtype == ml_dtypes.float8_e4m3fn and seen[f"{n}_descale"].shape == (2, 1)
        back = seen[n].astype(np.float32) * seen[f"{n}_descale"][0, 0]
        np.testing.assert_allclose(back, x.astype(np.float32), rtol=2**-4 * 1.001, atol=np.abs(back).max() * 2**-17)


# the command --------------------------------------------------------------------------------------------------------------


def test_the_command_in_the_simulator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--set", "head_dim=64", "--shape", "1,2,2,100,260", "--device", "cpu"]
    assert fagen_run(["check", "fa3_fp8", "--accuracy", *shape]) == 0
    text = capsys.readouterr().out
    assert "per block, Hadamard" in text and "best is" in text and "predicted / measured" not in text
    assert fagen_run(["check", "fa3_fp8", "--accuracy", *shape, "--markdown"]) == 0
    assert "| `fa3_fp8` | per tensor |" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_tensors_of_a_file(dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    path = tmp_path / "qkv.npz"
    npz.write(path, {n: cast(rng.standard_normal((2, 100, 2, 64)).astype(np.float32), dtype) for n in "qkv"})
    options = ["--accuracy", "--set", "head_dim=64", "--set", "scale=0.2", "--device", "cpu", "--json", "--input", str(path)]
    assert fagen_run(["check", "fa3", "fa3_fp8", *options]) == 0
    (e,) = json.loads(capsys.readouterr().out)["experiments"]
    assert (e["dtype"], e["scale"], e["inputs"].split(",")[0]) == (dtype, 0.2, "qkv.npz")
    assert [r["recipe"] for r in e["rows"]][::2][:2] == [f"scores, P and out in {dtype}", dtype]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fa3_fp8", "--output", "x.json"], "--output: has a meaning with --accuracy only"),
        (["fa3_fp8", "--input", "x.npz"], "--input: has a meaning with --accuracy only"),
        (["fa3_fp8", "--markdown"], "--markdown: has a meaning with --accuracy only"),
        (["fa3_fp8", "--accuracy", "--variants"], "--variants: has no meaning beside --accuracy"),
        (["fa3_fp8", "--accuracy", "--repeat", "2"], "--repeat: has no meaning beside --accuracy"),
        (["fa3_fp8", "--jitter", "3", "--repeat", "2"], "--repeat: has no meaning beside --jitter"),
        (["fa3_fp8", "--accuracy", "--evidence", "x.json"], "--evidence: has no meaning beside --accuracy"),
        (["fa3_fp8", "--accuracy", "--markdown", "--json"], "--markdown: given beside --json"),
        (["fa3_fp8", "--accuracy", "--set", "promote_every=2"], "--set: promote_every is what --accuracy varies"),
        (["fa3_fp8", "--accuracy", "--set", "dtype=bf16"], "--set: dtype is what --accuracy varies"),
        (["fa3_fp8", "--accuracy", "--set", "precision=e4m3"], "--set: precision is what --accuracy varies"),
        (["tuned", "--accuracy"], "SCHEDULE: the table is of named schedules"),
        (["fa3_fp8", "--accuracy", "--input", "x.npz", "--shape", "1,1,1,8,8"], "--shape: given beside --input"),
        (["fa3_fp8", "--accuracy", "--input", "missing.npz"], "missing.npz: no such file"),
        (["fa3_fp8", "--accuracy", "--set", "tile_kv=100"], "is not legal"),
        (["fa3_fp8", "--accuracy", "--output", "/nowhere/a.json"], "--output: there is no folder /nowhere"),
        (["fa3_fp8", "--accuracy", "--from", "x", "--device", "cpu"], "--from: speaks of compiled kernels"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fagen_run(["check", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_file_of_another_type_is_named(tmp_path: Path) -> None:
    path = tmp_path / "qkv.npz"
    npz.write(path, {n: np.zeros((1, 4, 1, 64), np.float32) for n in "qkv"})
    with pytest.raises(InputError, match="q is float32; the table compares kernels on fp16 or bf16"):
        accuracy.FileSource(str(path)).tensors()
    npz.write(path, {n: cast(np.zeros((1, 4, 1, 64), np.float32), "fp16" if n == "q" else "bf16") for n in "qkv"})
    with pytest.raises(InputError, match="k is bfloat16, q float16"):
        accuracy.FileSource(str(path)).tensors()


def test_a_gpu_that_is_not_there_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        command.common.choose_device("gpu")
    except LaunchError:
        assert fagen_run(["check", "fa3", "--accuracy", "--device", "gpu", "--shape", "1,1,1,64,64"]) == 1
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert "no GPU" in line
    else:
        pytest.skip("there is a GPU")
