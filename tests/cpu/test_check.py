"""Checking: cases and shapes, the simulator's side, and the GPU's side followed on a driver made of host memory."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda, InProcess, array_interface, attention_kernel, install, read_arguments

from fagen import Attention, HostError, InputError, LaunchError
from fagen.check import CaseResult, Item, check_cpu, check_gpu, jitter_problems, parse_shape, tiles_of
from fagen.check import cpu as check_cpu_module
from fagen.check import gpu as check_gpu_module
from fagen.compile import Built
from fagen.emit import emit
from fagen.guard import GuardError, read_bundle
from fagen.library import load
from fagen.oracle import CheckProblem, Verdict, check_problems
from fagen.plan import Plan, plan
from fagen.report import CompileReport, KernelReport

# cases ------------------------------------------------------------------------------------------------------------------


def test_shapes_from_the_command_line() -> None:
    assert parse_shape("2,8,4,100,333") == CheckProblem(batch=2, hq=8, hkv=4, sq=100, sk=333)
    assert parse_shape(" 1, 1,1,0,0") == CheckProblem(1, 0, 0, 1, 1)
    for text, why in (
        ("1,2,3", "five whole numbers"),
        ("1,2,1,64,x", "five whole numbers"),
        ("1,2,1,-1,5", "negative"),
        ("1,6,4,64,64", r"6 query heads are not a multiple of 4 KV heads \(nearest legal: \[2, 3, 6\]\)"),
        ("1,1,1,5,1073741824", r"outside 0 … 2\^30"),
        ("1,6,0,64,64", "not a multiple of 0 KV heads"),
    ):
        with pytest.raises(InputError, match=why) as caught:
            parse_shape(text)
        assert caught.value.argument == "--shape"


@pytest.mark.parametrize("name", ["fa2", "fa3"])
def test_problems_for_jitter_wrap_the_rings_and_give_a_cta_several_tiles(name: str) -> None:
    attention, schedule = load(name)
    problems = jitter_problems(attention, schedule)
    assert len(problems) == len(set(problems)) >= 4
    assert any(p.sk > 2 * schedule.stages_k * schedule.tile_kv for p in problems)
    assert any(p.batch * p.hq * -(-p.sq // schedule.tile_q) > 3 * 132 for p in problems)


def test_a_result_is_plain_json_even_if_its_error_is_infinite() -> None:
    lost = Verdict(False, np.inf, 0.0, np.inf, "out is NaN")
    result = CaseResult("fa3", CheckProblem(1, 5, 7, 4, 2, "sink", "fused"), "causal", 11, lost)
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert data["shape"] == [1, 4, 2, 5, 7] and data["mask"] == "causal" and data["seed"] == 11
    assert (data["inputs"], data["layout"]) == ("sink", "fused")
    assert (data["error"], data["bound"], data["error_ratio"], data["passed"]) == (None, 0.0, None, False)


# the simulator ----------------------------------------------------------------------------------------------------------


def test_the_simulator_judges_every_problem_in_order() -> None:
    attention, schedule = load("fa3", head_dim=64, mask="causal")
    problems = (
        CheckProblem(1, 65, 200, 4, 2),
        CheckProblem(1, 5, 0, 2, 1),
        CheckProblem(0, 5, 5, 2, 1),
        CheckProblem(1, 9, 3, 2, 2),
    )
    seen: list[CaseResult] = []
    results = check_cpu([Item("mine", attention, schedule, problems)], seed=5, repeat=2, on_result=seen.append)
    assert [r.problem for r in results] == list(problems)
    assert [r.seed for r in results] == [5, 6, 7, 8]
    assert all(r.verdict.passed and r.runs == 2 and r.mask == "causal" for r in results)
    assert sorted(seen, key=lambda r: r.seed) == results


@pytest.mark.parametrize(("head_dim", "seed"), [(64, 33000), (256, 3000)])
def test_a_single_key_is_held_to_sums_as_exact_as_its_bound(head_dim: int, seed: int) -> None:
    """Its score is all of lse. With these seeds it differs by more than the bound from what coarser sums of e4m3 products give."""
    attention, schedule = load("fa3_fp8", head_dim=head_dim)
    (result,) = check_cpu([Item("fa3_fp8", attention, schedule, (CheckProblem(1, 1, 1, 2, 1),))], seed=seed)
    assert result.verdict.passed, result.verdict.reason


def test_large_problems_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, schedule = load("fa2", head_dim=64)
    monkeypatch.setattr(check_cpu_module, "MOST_TILES", 3)
    problem = CheckProblem(1, 300, 300, 4, 2)
    assert tiles_of(problem, schedule) == 4 * 3 * 3
    (result,) = check_cpu([Item("fa2", attention, schedule, (problem,))], repeat=3)
    assert result.verdict.passed and result.runs == 1


def test_a_plan_that_hangs_in_the_simulator_fails_its_case(monkeypatch: pytest.MonkeyPatch) -> None:
    from fagen.check import judge
    from fagen.oracle import SimulatedDeadlock

    def hang(*_: Any, **__: Any) -> Any:
        raise SimulatedDeadlock("no role can go on")

    monkeypatch.setattr(judge, "simulate", hang)
    attention, schedule = load("fa3")
    (result,) = check_cpu([Item("fa3", attention, schedule, (CheckProblem(1, 5, 5, 2, 1),))])
    assert not result.verdict.passed and result.verdict.reason == "SimulatedDeadlock: no role can go on"


def test_interleavings_that_differ_fail_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    from fagen.check import judge

    honest = judge.simulate

    def fickle(*args: Any, seed: int, **knobs: Any) -> Any:
        out, lse = honest(*args, seed=seed, **knobs)
        return out, np.nextafter(lse, np.float32(np.inf)) if seed == 2 else lse

    monkeypatch.setattr(judge, "simulate", fickle)
    attention, schedule = load("fa3", head_dim=64)
    (result,) = check_cpu([Item("fa3", attention, schedule, (CheckProblem(1, 5, 5, 2, 1),))], repeat=4)
    assert not result.verdict.passed and result.verdict.reason == "interleaving 3 gives other bits than the first"


@pytest.mark.parametrize(("available", "workers"), [(1 << 40, 4), (3 << 30, 3), (1 << 20, 1)])
def test_as_many_judges_as_there_are_cores_and_memory(available: int, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from fagen.check import judge

    monkeypatch.setattr(judge, "available_bytes", lambda: available)
    monkeypatch.setattr(judge, "cores", lambda: 4)
    with judge.pool(100) as found:
        assert found._max_workers == workers


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_case_that_memory_is_too_small_for_is_refused(device: str, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it starts: the system would kill the process without a word. Judges that need more are fewer."""
    from fagen.check import judge

    attention, schedule = load("fa3", head_dim=64)
    item = Item("fa3", attention, schedule, (CheckProblem(1, 5, 5, 2, 1), CheckProblem(1, 1, 20_000_000, 1, 1)))
    monkeypatch.setattr(judge, "available_bytes", lambda: 8 << 30)
    monkeypatch.setattr(judge, "cores", lambda: 4)
    said = r"^--shape: 1,1,1,1,20000000 with fa3 takes about {} GiB of memory, .*; 8\.0 GiB are free: sizes {} times smaller fit$"
    said = said.format(*(("25.0", "3.1") if device == "cpu" else ("50.1", "6.3")))  # the GPU's process has a case of its own
    with pytest.raises(InputError, match=said):
        check_cpu([item]) if device == "cpu" else check_gpu([item], [built(plan(attention, schedule))])
    assert judge.room_for([Item("fa3", attention, schedule, item.problems[:1])]) < 1 << 20
    with judge.pool(100, 3 << 30) as found:
        assert found._max_workers == 2


def test_judges_leave_interrupts_to_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """From their first instruction on: one that is still importing would print where it was."""
    from fagen.check import judge

    monkeypatch.setattr(judge, "cores", lambda: 2)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with judge.pool(100) as judges:
        assert signal.SIGINT in judges.submit(signal.pthread_sigmask, signal.SIG_BLOCK, ()).result()
        judges.submit(os.kill, judges.submit(os.getpid).result(), signal.SIGINT).result()
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_a_judge_that_is_killed_is_no_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    from fagen.check import judge

    monkeypatch.setattr(judge, "cores", lambda: 2)
    killed = "one of the 2 processes that compute references ended before its work"
    with pytest.raises(HostError, match=killed), judge.pool(100) as judges:
        judges.submit(os.kill, judges.submit(os.getpid).result(), signal.SIGKILL).result()


# the GPU, made of host memory -------------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = install(monkeypatch)
    monkeypatch.setattr("fagen.driver.pointer_device", lambda ptr: 0)
    monkeypatch.setattr("fagen.interop.dlpack._view", array_interface)
    monkeypatch.setattr(check_gpu_module.guard, "Watched", InProcess)
    return cuda


def built(p: Plan, name: str = "fa3") -> Built:
    kernel = KernelReport("attention", 168, None, 0, 0, 0, p.kernels[0].smem_bytes, (), None, {}, None, ())
    return Built(p, emit(p, name), b"cubin", CompileReport(p.schedule.arch, "NVRTC 13.5.37", 0.5, (kernel,), ()))


def make(name: str = "fa2", debug: bool = False, **knobs: Any) -> tuple[Attention, Any, Built]:
    attention, schedule = load(name, head_dim=64, **knobs)
    return attention, schedule, built(plan(attention, schedule, debug=debug), name)


def check(
    fake: FakeCuda, kernel: Callable[[int], None], b: Built, problems: tuple[CheckProblem, ...], tmp_path: Path, **options: Any
):
    fake.kernel = kernel
    item = Item(b.source.name, b.plan.attention, b.plan.schedule, problems)
    return check_gpu([item], [b], bundles=tmp_path / "repro", **options)


LAYOUTS = (
    CheckProblem(2, 5, 7, 4, 2),
    CheckProblem(2, 9, 9, 4, 2, "normal", "fused"),
    CheckProblem(2, 9, 7, 4, 4, "normal", "transposed"),
    CheckProblem(2, 5, 11, 2, 1, "normal", "strided_k"),
    CheckProblem(1, 5, 0, 2, 1),
    CheckProblem(0, 5, 5, 2, 1),
    CheckProblem(1, 0, 5, 2, 1),
)


@pytest.mark.parametrize("name", ["fa2", "fa3"])
def test_a_right_kernel_passes_in_every_layout(name: str, fake: FakeCuda, tmp_path: Path) -> None:
    attention, schedule, b = make(name, **({"parallelism": "persistent_static"} if name == "fa3" else {}))
    assert set(LAYOUTS) - set(check_problems(attention, schedule)), "these are sizes of the test's own"
    run = check(fake, attention_kernel(b.plan), b, LAYOUTS, tmp_path, seed=9)
    assert [(r.problem, r.seed) for r in run.results] == [(p, 9 + i) for i, p in enumerate(LAYOUTS)]
    assert [r.verdict.reason for r in run.results] == [""] * len(LAYOUTS)
    assert run.gpu == "Fake GPU" and run.driver.endswith("CUDA 13.0") and not run.bundles
    assert not fake.memory and not fake.contexts, "everything is given back"
    assert not (tmp_path / "repro").exists()


DESCALED = tuple(CheckProblem(2, 9, 9, 4, 2, "descaled", layout) for layout in ("contiguous", "fused", "transposed", "strided_k"))


@pytest.mark.parametrize(
    "changes",
    [{}, {"v_transposed": True, "reference": "running", "stages": 2}, {"dtype": "int8"}],
    ids=["e4m3", "V transposed", "int8"],
)
def test_8_bits_with_descales_in_every_layout(changes: dict[str, Any], fake: FakeCuda, tmp_path: Path) -> None:
    _, _, b = make("fa3_fp8", **changes)
    problems = (*LAYOUTS, *DESCALED, CheckProblem(2, 5, 0, 4, 2, "descaled"))
    run = check(fake, attention_kernel(b.plan), b, problems, tmp_path, seed=3)
    assert [r.verdict.reason for r in run.results] == [""] * len(problems)
    assert run.results[-2].to_dict()["inputs"] == "descaled"


@pytest.mark.parametrize("descale", ["q_descale", "k_descale", "v_descale"])
def test_a_kernel_that_ignores_a_descale_fails(descale: str, fake: FakeCuda, tmp_path: Path) -> None:
    _, _, b = make("fa3_fp8")
    honest = attention_kernel(b.plan)

    def kernel(params: int) -> None:
        _, p = read_arguments(b.plan.kernels[0], params)
        setattr(p, descale, 0)
        honest(params)

    run = check(fake, kernel, b, DESCALED, tmp_path, seed=3)
    assert not any(r.verdict.passed for r in run.results)


def test_inputs_keep_their_strides_on_the_device(fake: FakeCuda, tmp_path: Path) -> None:
    """The layouts would be worth nothing if the tensors were made contiguous on the way."""
    _, _, b = make()
    seen = []
    honest = attention_kernel(b.plan)

    def kernel(params: int) -> None:
        _, p = read_arguments(b.plan.kernels[0], params)
        seen.append((p.q_ss, p.k_ss, p.v_ss))
        honest(params)

    check(fake, kernel, b, LAYOUTS[:4], tmp_path)
    assert seen == [(4 * 64, 2 * 64, 2 * 64), (8 * 64,) * 3, (64, 64, 64), (2 * 64, 2 * 64, 64)]


def spoiled(b: Built, spoil: Callable[[Any, Any, Any], None]) -> Callable[[int], None]:
    """The right kernel, then `spoil(launch arguments, the first words of out, number of the launch)`."""
    honest, launches = attention_kernel(b.plan), []

    def kernel(params: int) -> None:
        honest(params)
        _, p = read_arguments(b.plan.kernels[0], params)
        launches.append(params)
        spoil(p, np.ctypeslib.as_array((ctypes.c_uint16 * 64).from_address(p.out)), len(launches))

    return kernel


ONE = (CheckProblem(1, 5, 7, 2, 1),)


def _wrong(p: Any, out: Any, n: int) -> None:
    out[3] ^= 0x0100


def _unwritten(p: Any, out: Any, n: int) -> None:
    out[5] = 0xFFFF


def _beside(p: Any, out: Any, n: int) -> None:
    ctypes.memset(p.out - 2, 0, 2)


def _fickle(p: Any, out: Any, n: int) -> None:
    out[7] ^= n == 3


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_wrong, r"out\[0, 0, 0, 3\] is .* above the bound"),
        (_unwritten, r"1 of 640 elements of out are NaN"),
        (_beside, r"2 bytes beside out were overwritten"),
        (_fickle, r"run 3 gives other bits than the first$"),
    ],
)
def test_every_way_of_being_wrong_is_noticed(spoil: Any, reason: str, fake: FakeCuda, tmp_path: Path) -> None:
    _, _, b = make()
    run = check(fake, spoiled(b, spoil), b, ONE, tmp_path, seed=4, repeat=4)
    (result,) = run.results
    assert not result.verdict.passed
    assert re.search(reason, result.verdict.reason), result.verdict.reason
    facts = read_bundle(run.bundles["fa2"])
    assert facts["case"] == {"problem": asdict(ONE[0]), "seed": 4, "repeat": 4, "jitter": False}
    assert facts["reason"] == result.verdict.reason and facts["gpu"] == "Fake GPU"


def test_a_kernel_that_does_nothing_fails(fake: FakeCuda, tmp_path: Path) -> None:
    _, _, b = make()
    run = check(fake, lambda params: None, b, ONE, tmp_path)
    assert "640 of 640 elements of out are NaN" in run.results[0].verdict.reason


def test_jitter_seeds_every_run_differently(fake: FakeCuda, tmp_path: Path) -> None:
    _, _, b = make(debug=True)
    seeds = []
    honest = attention_kernel(b.plan)

    def kernel(params: int) -> None:
        seeds.append(read_arguments(b.plan.kernels[0], params)[1].seed)
        honest(params)

    run = check(fake, kernel, b, ONE, tmp_path, repeat=5, jitter=True)
    assert run.results[0].verdict.passed and run.results[0].runs == 5
    assert seeds == [1, 2, 3, 4, 5]


def test_a_fault_ends_the_run_and_leaves_a_bundle(fake: FakeCuda, tmp_path: Path) -> None:
    from cuda.bindings import driver as real

    _, _, b = make()
    honest = attention_kernel(b.plan)

    def kernel(params: int) -> None:
        honest(params)
        if len(fake.launches) == 2:
            fake.fail["cuStreamSynchronize"] = real.CUresult.CUDA_ERROR_LAUNCH_FAILED

    problems = (*ONE, CheckProblem(1, 6, 7, 2, 1), CheckProblem(1, 8, 8, 2, 1))
    seen: list[CaseResult] = []
    with pytest.raises(LaunchError, match=r"launch of fa2 on 1,2,1,6,7: cuStreamSynchronize failed") as caught:
        check(fake, kernel, b, problems, tmp_path, seed=7, on_result=seen.append)
    assert isinstance(caught.value.__cause__, GuardError)
    assert [r.problem for r in seen] == [problems[0]], "what ran before is judged and told"
    (folder,) = (tmp_path / "repro").iterdir()
    assert str(folder) in str(caught.value)
    facts = read_bundle(folder)
    assert facts["case"]["problem"] == asdict(problems[1]) and facts["case"]["seed"] == 8 and facts["failure"] == "fault"


def test_no_gpu_is_said_before_anything_starts() -> None:
    from fagen.check import reason_no_gpu

    if not reason_no_gpu():
        pytest.skip("there is a GPU")
    _, _, b = make()
    with pytest.raises(LaunchError, match=r"^no GPU: "):
        check_gpu([Item("fa2", b.plan.attention, b.plan.schedule, ONE)], [b])


def test_several_kernels_in_one_run(fake: FakeCuda, tmp_path: Path) -> None:
    _, _, first = make("fa2")
    _, _, other = make("fa2", dtype="fp16")
    other = replace(other, source=replace(other.source, name="fa2.hd64-fp16-full"))
    kernels = {b.plan.attention.dtype: attention_kernel(b.plan) for b in (first, other)}
    turns = iter(["bf16", "bf16", "fp16", "fp16"])
    fake.kernel = lambda params: kernels[next(turns)](params)
    problems = (CheckProblem(1, 5, 7, 2, 1), CheckProblem(1, 6, 7, 2, 1))
    items = [Item(b.source.name, b.plan.attention, b.plan.schedule, problems) for b in (first, other)]
    run = check_gpu(items, [first, other], bundles=tmp_path)
    assert [r.item for r in run.results] == ["fa2", "fa2", "fa2.hd64-fp16-full", "fa2.hd64-fp16-full"]
    assert all(r.verdict.passed for r in run.results)
