"""The watched subprocess: every way in which a worker can fail to finish, and the bundle it leaves."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fagen import InputError, LaunchError
from fagen.compile import Built, load_built
from fagen.emit import emit
from fagen.guard import GuardError, Watched, explained, read_bundle, record_text, write_bundle
from fagen.library import load
from fagen.plan import plan
from fagen.report import CompileReport, KernelReport

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker must find guard_tasks."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))


def messages(task: str, **request: Any) -> list[dict[str, Any]]:
    with Watched(f"guard_tasks:{task}", request) as worker:
        return list(worker.messages())


def failure(task: str, **request: Any) -> GuardError:
    with pytest.raises(GuardError) as caught:
        messages(task, **request)
    return caught.value


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"  # a zombie is dead, only its parent has not noticed


def gone_within(pids: list[int], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while any(map(alive, pids)):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def test_messages_arrive_in_order_and_prints_do_not_disturb_them() -> None:
    assert [m["text"] for m in messages("echo", words=["a", "b\n", "ü"])] == ["a", "b\n", "ü"]


def test_a_hang_is_killed_in_time_with_all_that_the_worker_started() -> None:
    pids: list[int] = []
    with Watched("guard_tasks:hang", {"seconds": 0.5}) as worker, pytest.raises(GuardError) as caught:
        for message in worker.messages():
            pids = message["pids"]
            start = time.monotonic()
    assert time.monotonic() - start < 5
    assert len(pids) == 2 and gone_within(pids, 5)
    e = caught.value
    assert (e.kind, e.doing) == ("hang", "launch of fa3 on 1,2,1,64,64")
    assert "no sign of life for 0.5 s" in str(e)
    assert "about to hang" in e.log


def test_work_that_reports_is_not_killed_however_long_it_takes_in_all() -> None:
    assert [m["text"] for m in messages("slow_but_alive")] == ["done"]


def test_a_worker_that_cannot_start_in_time() -> None:
    with Watched("guard_tasks:hang", {"seconds": 60}, startup_seconds=0.01) as worker, pytest.raises(GuardError) as caught:
        list(worker.messages())
    assert (caught.value.kind, caught.value.doing) == ("hang", "the worker starts")


@pytest.mark.parametrize(
    ("task", "doing", "detail"),
    [("end", "the end", "exit status 7"), ("crash", "the crash", "signal SIGABRT"), ("bug", "the sum", "a fault of ours")],
)
def test_a_worker_that_dies(task: str, doing: str, detail: str) -> None:
    e = failure(task)
    assert (e.kind, e.doing) == ("death", doing)
    assert detail in str(e)
    if task == "end":
        assert "last words" in e.log


def test_a_mistake_of_the_user_comes_through_as_it_was_raised() -> None:
    with pytest.raises(InputError, match=r"^q: is not what it should be$") as caught:
        messages("mistake")
    assert caught.value.argument == "q"


def test_a_fault_of_the_kernel_brings_its_record() -> None:
    e = failure("fault")
    assert (e.kind, e.record) == ("fault", (1, 2, 3))
    again = pickle.loads(pickle.dumps(e))
    assert (again.kind, again.doing, again.detail, again.log, again.record) == (e.kind, e.doing, e.detail, e.log, e.record)


def test_leaving_early_ends_the_worker() -> None:
    with Watched("guard_tasks:hang", {"seconds": 600}) as worker:
        pids = next(worker.messages())["pids"]
    assert gone_within(pids, 5)


def test_the_worker_ends_with_its_parent() -> None:
    """Even if the parent is killed and cannot clean up; but what the worker started is then left to itself."""
    code = (
        "from fagen.guard import Watched\n"
        "with Watched('guard_tasks:hang', {'seconds': 600}) as w:\n"
        "    m = w.messages(); print(*next(m)['pids'], flush=True); next(m)"
    )
    root = str(HERE.parent.parent)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, str(HERE)])}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env) as parent:
        assert parent.stdout is not None
        worker, child = (int(p) for p in parent.stdout.readline().split())
        parent.kill()
    try:
        assert gone_within([worker], 5)
    finally:
        os.kill(child, signal.SIGKILL)


# bundles ----------------------------------------------------------------------------------------------------------------


def built(debug: bool = False) -> Built:
    """A kernel as it stands on disk, with an invented cubin: nothing is compiled or run here."""
    p = plan(*load("fa3", head_dim=64), debug=debug)
    kernel = KernelReport("attention", 168, None, 0, 0, 0, p.kernels[0].smem_bytes, (), None, {}, None, ())
    return Built(p, emit(p, "fa3.hd64"), b"cubin", CompileReport("sm_90a", "NVRTC 13.5.37", 0.5, (kernel,), ()))


CASE = {"problem": {"batch": 1}, "seed": 3}


def test_a_bundle_holds_all_that_a_rerun_needs(tmp_path: Path) -> None:
    b = built()
    lost = GuardError("hang", "launch of fa3", "no sign of life for 20 s", "the log\n")
    folder = write_bundle(b, {"case": CASE, "gpu": "H200"}, lost, tmp_path / "repro")
    assert folder.parent == tmp_path / "repro" and folder.name.startswith("fa3.hd64-")
    facts = read_bundle(folder)
    assert facts["case"] == CASE and facts["gpu"] == "H200"
    assert (facts["failure"], facts["doing"], facts["name"]) == ("hang", "launch of fa3", "fa3.hd64")
    assert (folder / "log.txt").read_text() == "the log\n"
    again = load_built(folder, facts["name"])
    assert (again.plan, again.cubin, again.source.text) == (b.plan, b.cubin, b.source.text)
    assert write_bundle(b, {"case": CASE}, lost, tmp_path / "repro") != folder, "a second failure must not overwrite the first"


def test_a_bundle_goes_elsewhere_where_its_place_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "repro").write_text("a file in the way")
    folder = write_bundle(built(), {"case": CASE}, None, tmp_path / "repro")
    assert read_bundle(folder)["case"] == CASE


def test_the_user_reads_what_happened_and_where_the_bundle_is(tmp_path: Path) -> None:
    lost = GuardError("hang", "launch of fa3 on 1,2,1,64,64", "no sign of life for 20 s")
    error = explained(lost, built(), {"case": CASE}, tmp_path)
    assert isinstance(error, LaunchError) and error.exit_code == 1
    (folder,) = tmp_path.iterdir()
    assert str(error).startswith("launch of fa3 on 1,2,1,64,64: no sign of life for 20 s")
    assert f"fagen repro {folder}" in str(error)
    assert "bundle" not in str(explained(lost, built(), {"case": CASE}, None))


def test_a_record_is_decoded() -> None:
    debug = pytest.importorskip("fagen.debug")
    b = built(debug=True)
    kernel = b.plan.kernels[0]
    steps = debug.steps_of(kernel)
    words = [0] * 64
    at = next(i for i, s in enumerate(steps) if s.kind == "Wait")
    words[0] = debug.MAGIC
    waiting = {"step": at, "role": 0, "kernel": 0}
    for i, name in enumerate(f for f in debug.Waiting.__dataclass_fields__):
        words[1 + i] = waiting.get(name, 0)
    text = record_text(GuardError("fault", "launch", "trapped", record=tuple(words)), b.plan)
    assert steps[at].bar in text and kernel.roles[0].name in text
    assert record_text(GuardError("hang", "launch", "killed"), b.plan) == ""


@pytest.mark.parametrize("content", [None, "{", "[]", json.dumps({"name": "fa3"})])
def test_what_is_no_bundle_is_refused_by_name(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "bundle.json").write_text(content)
    with pytest.raises(InputError, match=str(tmp_path)):
        read_bundle(tmp_path)
