"""`fagen trace` from the command line to the files, on a driver made of host memory whose kernels leave the simulator's marks behind."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from fake_cuda import FakeCuda, InProcess, attention_kernel, install, read_arguments
from trace_source import simulated

import fagen
from fagen import LaunchError
from fagen.check import gpu as check_gpu_module
from fagen.cli import run
from fagen.explore.trace.run import EVERY_CTA
from fagen.launch import Kernel
from fagen.oracle import CheckProblem
from fagen.plan import Plan, plan
from fagen.plan.kernel import TRACE_CTAS, trace_buffer

MS = {"normal": 10000.0, "traced": 10200.0, "writing": 10300.0}
"""What a launch takes, of `run.LAUNCHES`: far above what NumPy takes here."""
SETTINGS = ("--set", "head_dim=64", "--set", "tile_kv=64", "--set", "parallelism=persistent_static")
PROBLEM = CheckProblem(1, 300, 200, 2, 1)
SHAPE = ("--shape", "1,2,1,300,200")


def plans(trace: bool, **changes: Any) -> Plan:
    settings = {"head_dim": 64, "tile_kv": 64, "parallelism": "persistent_static", **changes}
    return plan(*fagen.load("fa3", **settings), trace=trace)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `fagen build --trace` writes: the kernels of all tests."""
    path = tmp_path_factory.mktemp("built")
    assert run(["build", "fa3", *SETTINGS, "--trace", "-o", str(path)]) == 0
    assert run(["build", "fa3", *SETTINGS, "--set", "overlap=within", "--trace", "-o", str(path)]) == 0
    assert sorted(p.suffix for p in path.iterdir()) == sorted([".cu", ".cubin", ".json"] * 4)
    return path


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, folder: Path) -> FakeCuda:
    """A GPU of two SMs that runs those kernels: it knows each by its cubin."""
    fake = install(monkeypatch)
    monkeypatch.setattr(check_gpu_module.guard, "Watched", InProcess)
    monkeypatch.setattr("fagen.explore.trace.run.ROUNDS", 4)
    monkeypatch.setattr("fagen.explore.trace.run.burst", quick_burst)
    known: dict[bytes, int] = {}
    behaviour: dict[int, Callable[[int], None]] = {}
    traces: set[int] = set()
    for overlap in ("both", "within"):
        for trace in (False, True):
            p = plans(trace, overlap=overlap)
            name = next(f.stem for f in folder.glob("*.json") if _is(f, p))
            handle = 0x100 + len(known)
            known[(folder / f"{name}.cubin").read_bytes()] = handle
            behaviour[handle] = noting(p) if trace else attention_kernel(p)
            traces |= {handle} if trace else set()
    multiprocessors = FakeCuda.do_cuDeviceGetAttribute

    def attribute(self: FakeCuda, what: Any, device: int) -> Any:
        return (0, 2) if what.name.endswith("MULTIPROCESSOR_COUNT") else multiprocessors(self, what, device)

    monkeypatch.setattr(FakeCuda, "do_cuDeviceGetAttribute", attribute)
    monkeypatch.setattr(FakeCuda, "do_cuModuleLoadData", staticmethod(lambda self, image: (0, known[image])))
    monkeypatch.setattr(FakeCuda, "do_cuModuleGetFunction", staticmethod(lambda self, module, name: (0, module)))

    def kernel(params: int) -> None:
        launch = fake.launches[-1]
        behaviour[launch.function](params)
        launch.ms = MS["normal" if launch.function not in traces else "writing" if WRITE[-1][1] == EVERY_CTA else "traced"]

    fake.kernel = kernel
    return fake


def quick_burst(tasks: Any, clock: Any, rounds: int) -> Any:
    """As `timing.burst`, without the rests."""
    from fagen.explore.timing import burst

    return burst(tasks, clock, rounds, rest=0.0)


def _is(record: Path, p: Plan) -> bool:
    data = json.loads(record.read_text())
    return bool(data["schedule"] == p.schedule.to_dict() and data.get("trace", False) == p.trace)


WRITE: list[tuple[int, int]] = []
"""Of each launch of a trace build: the first CTA that writes marks, and how many do."""


def noting(p: Plan) -> Callable[[int], None]:
    """The kernel, which also fills its trace buffer."""
    compute = attention_kernel(p)
    made: dict[int, Any] = {}

    def run_(params: int) -> None:
        compute(params)
        _, arguments = read_arguments(p.kernels[0], params)
        first = arguments.trace_first
        WRITE.append((first, arguments.trace_count))
        if first not in made:
            made[first] = simulated(p, PROBLEM, num_sms=2, first=first)[1]["attention"]
        address = getattr(arguments, trace_buffer("attention"))
        ctypes.memmove(address, made[first].ctypes.data, made[first].nbytes)

    return run_


def test_without_a_gpu_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def none() -> Any:
        raise LaunchError("no GPU: the CUDA driver sees no device")

    monkeypatch.setattr("fagen.driver.api", none)
    assert run(["trace", "fa3"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err == "fagen: no GPU: the CUDA driver sees no device\n"


def test_files_and_numbers(gpu: FakeCuda, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, svg = tmp_path / "trace.json", tmp_path / "trace.svg"
    assert run(["trace", "fa3", *SETTINGS, *SHAPE, "--from", str(folder), "-o", str(output), "--svg", str(svg)]) == 0
    out, err = capsys.readouterr()
    assert "1,2,1,300,200 on Fake GPU" in out
    assert "normal 10000.0000 ms, traced 10200.0000 ms a launch: " in out
    assert "overhead +2.0% (+2.0% to +2.0%), within a recorded CTA +3.0% (+3.0% to +3.0%)\n" in out
    assert "2 CTAs recorded, SM clock 1500 MHz" in out
    assert "softmax of consumer 0:" in out and "under products:" in out and "of them under work" in out
    assert "wait data" in out and "producer" in out and "a tile takes" in out
    assert "warning" not in err
    events = json.loads(output.read_text())
    assert events["otherData"]["gpu"] == "Fake GPU" and len(events["traceEvents"]) > 200
    text = svg.read_text()
    ElementTree.fromstring(text)
    assert "1,2,1,300,200 on Fake GPU; softmax:" in text


def test_json_is_clean_and_beside_is_a_second_kernel(
    gpu: FakeCuda, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, svg = tmp_path / "t.json", tmp_path / "t.svg"
    command = ["trace", "fa3", *SETTINGS, *SHAPE, "--beside", "overlap=within", "--from", str(folder)]
    assert run([*command, "-o", str(output), "--svg", str(svg), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [k["title"].partition(",")[0].split()[-1] for k in facts["kernels"]][1] == "overlap=within"
    for kernel in facts["kernels"]:
        assert kernel["overhead"]["median"] == pytest.approx(0.02) and kernel["same_bits"]
        assert kernel["cta_overhead"]["median"] == pytest.approx(0.03) and kernel["writing_ms"] == MS["writing"]
        assert {x["lane"] for x in kernel["traces"][0]["softmax"]} == {"consumer 0", "consumer 1", "consumer 2"}
    turns = ["wait turn" in k["traces"][0]["time"]["consumer"] for k in facts["kernels"]]
    assert turns == [True, False]  # without ping-pong nobody waits for a turn
    written = json.loads(output.read_text())
    assert written["otherData"]["kernels"][0]["cta_overhead"] == facts["kernels"][0]["cta_overhead"]
    processes = {e["pid"] for e in written["traceEvents"]}
    assert len(processes) == 4 and svg.read_text().count("font-weight='bold'") == 2


def test_another_first_cta(gpu: FakeCuda, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["trace", "fa3", *SETTINGS, *SHAPE, "--from", str(folder), "-o", str(tmp_path / "t.json")]
    WRITE.clear()
    assert run([*command, "--cta", "1", "--json"]) == 0
    recorded, writing = (1, TRACE_CTAS), (0, EVERY_CTA)
    assert WRITE[:2] == [recorded, writing] and WRITE[-1] == recorded  # results compared; the launch that is shown
    assert WRITE[2:-1].count(recorded) == WRITE[2:-1].count(writing) > 4  # timed
    (kernel,) = json.loads(capsys.readouterr().out)["kernels"]
    assert kernel["traces"][0]["ctas"] == 1
    names = [e["args"]["name"] for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["name"] == "process_name"]
    assert len(names) == 1 and "CTA 1 on SM 40" in names[0]


@pytest.mark.parametrize(
    ("ms", "said"),
    [
        ({"traced": 10700.0, "writing": 10300.0}, "tracing costs the launch 7.0%, above 5%"),
        ({"traced": 10100.0, "writing": 10600.0}, "tracing costs a recorded CTA 6.0%, above 5%"),
        ({"traced": 10700.0, "writing": 10800.0}, "tracing costs the launch 7.0% and a recorded CTA 8.0%, above 5%"),
    ],
)
def test_an_expensive_trace_is_said(
    gpu: FakeCuda,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    ms: dict[str, float],
    said: str,
) -> None:
    for launch, value in ms.items():
        monkeypatch.setitem(MS, launch, value)
    command = ["trace", "fa3", *SETTINGS, *SHAPE, "--from", str(folder), "-o", str(tmp_path / "t.json")]
    assert run(command) == 0
    assert said in capsys.readouterr().err


def test_launches_too_short_to_time_are_said(
    gpu: FakeCuda, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["trace", "fa3", *SETTINGS, *SHAPE, "--from", str(folder), "-o", str(tmp_path / "t.json")]
    with pytest.MonkeyPatch.context() as m:
        for launch in MS:
            m.setitem(MS, launch, 1e-6)
        m.setattr("fagen.explore.trace.run.launches_for", lambda measured_ms, launches: 2)
        assert run(command) == 0
    out = capsys.readouterr().out
    assert "within a recorded CTA" not in out and "overhead unknown: a launch takes 0 µs, queueing it" in out


def test_other_results_fail(gpu: FakeCuda, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right = gpu.kernel
    assert right is not None

    def wrong(params: int) -> None:
        right(params)
        if gpu.launches[-1].ms == MS["traced"]:
            _, arguments = read_arguments(plans(True).kernels[0], params)
            ctypes.memset(arguments.out, 0, 64)

    gpu.kernel = wrong
    command = ["trace", "fa3", *SETTINGS, *SHAPE, "--from", str(folder), "-o", str(tmp_path / "t.json")]
    assert run(command) == 1
    assert "gives other results than the normal one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cta", "2"], "--cta: 2 is not among the 2 CTAs of fa3"),
        (["--beside", "overlap=both"], "--beside: overlap=both is what fa3 has already"),
        (["--beside", "mask=causal"], "--beside: changes the attention"),
        (["--beside", "overlap"], "--beside: 'overlap' is not knob=value"),
        (["--beside", "overlop=both"], "--beside: no knob 'overlop'"),
        (["--shape", "1,2,1,300,0"], "--shape: 1,2,1,300,0 has nothing to compute"),
        (["--shape", "4000000,2,1,3,3"], "--shape: 4000000,2,1,3,3 has 8000000 tiles; a trace numbers"),
        (["-o", "no/such/folder.json"], "no/such/folder.json: cannot be written: there is no folder no/such"),
        (["--svg", "."], ".: is a folder; expected the name of a file"),
        (["--from", "nowhere"], "cannot be read"),
    ],
)
def test_mistakes_are_named(
    gpu: FakeCuda, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    usual = ["-o", str(tmp_path / "t.json"), *SHAPE, "--from", str(folder)]
    assert run(["trace", "fa3", *SETTINGS, *usual, *arguments]) == 2
    out, err = capsys.readouterr()
    assert message in err and not out and not (tmp_path / "t.json").exists()


def test_a_fault_leaves_a_bundle(
    gpu: FakeCuda, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cuda.bindings.driver import CUresult

    monkeypatch.chdir(tmp_path)
    gpu.fail["cuLaunchKernelEx"] = CUresult.CUDA_ERROR_LAUNCH_FAILED
    assert run(["trace", "fa3", *SETTINGS, *SHAPE, "--from", str(folder)]) == 1
    err = capsys.readouterr().err
    assert "CUDA_ERROR_LAUNCH_FAILED" in err and "repro bundle: repro/" in err and len(list((tmp_path / "repro").iterdir())) == 1


def test_build_refuses_debug_beside_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["build", "fa3", "--debug", "--trace", "-o", str(tmp_path)]) == 2
    assert "--trace: given beside --debug" in capsys.readouterr().err and not list(tmp_path.iterdir())


# the kernel's own memory -----------------------------------------------------------------------------------------------


def test_a_kernels_trace_is_its_own_and_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, p = install(monkeypatch), plans(True)
    kernel = Kernel(p, "// text", b"cubin", None)
    seen: list[tuple[int, int]] = []

    def note(params: int) -> None:
        _, arguments = read_arguments(p.kernels[0], params)
        seen.append((arguments.trace_first, arguments.trace_count))
        (ctypes.c_uint32 * 2).from_address(arguments.trace_attention)[:] = (7, 9)

    fake.kernel = note
    x = np.zeros((1, 3, 1, 64), fagen.oracle.DTYPES["bf16"])
    with pytest.raises(LaunchError, match="traces of the devices"):
        kernel.trace_words()
    kernel(x, x, x)
    kernel.trace_first, kernel.trace_count = 5, 1
    kernel(x, x, x)
    words = kernel.trace_words()["attention"]
    assert seen == [(0, TRACE_CTAS), (5, 1)] and words[:2].tolist() == [7, 9] and (words[2:] == 0xFFFFFFFF).all()
    buffers = len(fake.memory)
    kernel.unload()
    assert len(fake.memory) == buffers - 1
    with pytest.raises(LaunchError, match="is not a trace build"):
        Kernel(plans(False), "// text", b"cubin", None).trace_words()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch"], "nosuch: no such schedule file or name"),
        (["fa3", "--shape", "1,2"], "--shape: '1,2' is not B,HQ,HKV,SQ,SK"),
        (["fa3", "--set", "tile_kv=100"], "tile_kv: 100 is not a multiple of 16"),
        (["fa3_fp8", "--set", "dtype=bf16", "--set", "precision=e4m3"], "trace: given beside precision 'e4m3'"),
    ],
)
def test_what_is_wrong_with_the_call_is_said_with_or_without_a_gpu(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["trace", *arguments]) != 0
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())
