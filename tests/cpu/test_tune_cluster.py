"""Tuning over dask.distributed, on a cluster in this process with made-up kernels."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_tuning import FA3, FULL, LONG, SHORT, FakeRunner

from fagen import InputError, LaunchError
from fagen.explore import tune, tune_cluster
from fagen.explore.tune_cluster import Cluster
from fagen.explore.tune_memory import Forgetful
from fagen.explore.tune_result import Broken, Candidate
from fagen.explore.tune_space import Space

distributed = pytest.importorskip("distributed", reason="dask.distributed is not installed (extra: cluster)")


class Machine(FakeRunner):
    """What a worker makes of itself: kernels are files in its folder, a bundle is left by what traps."""

    def __init__(self, folder: str, jobs: int, *, seed: int = 0, bundles: Path = Path("repro")):
        super().__init__({112: "traps", 128: "does not compile", 176: "wrong when long"})
        self.folder, self.bundles = Path(folder), bundles

    def compile(self, attention: Any, candidates: Any, heard: Any, expired: Any) -> Any:
        for c in candidates:
            (self.folder / f"{c.name}.cubin").write_bytes(c.name.encode())
        return super().compile(attention, candidates, heard, expired)

    def verify(self, attention: Any, candidates: Any, heard: Any) -> Any:
        for c in candidates:
            assert (self.folder / f"{c.name}.cubin").read_bytes() == c.name.encode()
        found = super().verify(attention, candidates, heard)
        for name, broken in found.items():
            if broken is not None and broken.bundle is not None:
                bundle = self.bundles / name
                bundle.mkdir(parents=True)
                (bundle / "bundle.json").write_text("{}")
                found[name] = Broken(broken.reason, str(bundle))
        return found


class Broken2(Machine):
    def race(self, *_: Any, **__: Any) -> Any:
        raise ValueError("a fault of ours")


class Slow(Machine):
    def compile(self, attention: Any, candidates: Any, heard: Any, expired: Any) -> Any:
        time.sleep(0.3)
        super().compile(attention, candidates, heard, expired)
        return {c.name: None for c in candidates}


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None) as cluster,
        distributed.Client(cluster) as found,
    ):
        yield found


def work(client: Any, folder: Path, machine: str = "Machine") -> Any:
    runner = Cluster(client, folder / "kernels", bundles=folder / "repro", workshop=f"{__name__}:{machine}")
    schedules = tuple(FA3.replace(tile_kv=t) for t in (80, 96, 112, 128, 144, 160, 176))
    space = Space(FULL, schedules, 7, {}, 7)
    space, times = tune.predicted(space, (SHORT, LONG), runner)
    candidates, lost = tune.pruned(space, times, (SHORT, LONG), lambda s: f"c.{s.tile_kv}", keep=6)
    prepared = tune.prepare(space, candidates, lost, "fa3", schedules[0], runner)
    return tune.tune(prepared, (SHORT, LONG), runner, date="2026-11-29", memory=Forgetful(), peers=("fa3",))


def test_a_tune_over_a_cluster(client: Any, tmp_path: Path) -> None:
    result = work(client, tmp_path)
    assert [s.winner for s in result.shapes] == ["c.160", "c.160"] and result.prepared.pruned == 1
    assert result.gpu == "NVIDIA H200" and result.shapes[0].peers
    assert {(f.name, f.stage) for f in (*result.prepared.failures, *result.failures)} == {
        ("c.128", "compile"),
        ("c.112", "verify"),
        ("c.176", "measure"),
    }
    trap = next(f for f in result.failures if f.name == "c.112")
    assert trap.bundle == str(tmp_path / "repro" / "c.112") and (tmp_path / "repro" / "c.112" / "bundle.json").read_text() == "{}"
    assert {p.name for p in (tmp_path / "kernels").iterdir()} == {f"c.{t}.cubin" for t in (96, 112, 144, 160, 176)}


def test_a_fault_on_a_worker_is_told(client: Any, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="a worker of the cluster failed: ValueError: a fault of ours"):
        work(client, tmp_path, "Broken2")


def test_nobody_at_the_address_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_cluster, "CONNECT_SECONDS", 1)
    with pytest.raises(LaunchError, match=r"^no cluster: 127\.0\.0\.1:1 does not answer"):
        tune_cluster.connect("127.0.0.1:1")


def test_without_dask_the_option_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "distributed", None)
    with pytest.raises(InputError, match=r"--cluster: needs dask.distributed .*pip install 'fagen\[cluster\]'"):
        tune_cluster.connect("127.0.0.1:1")


def test_what_is_not_begun_in_time_is_left_out(client: Any, tmp_path: Path) -> None:
    """The budget is used up behind the first answer: what waits is cancelled, and what came is kept."""
    runner = Cluster(client, tmp_path, workshop=f"{__name__}:Slow")
    candidates = [Candidate(f"c.{16 * i}", FA3.replace(tile_kv=16 * i)) for i in range(2, 42)]
    reasons = runner.compile(FULL, candidates, lambda _: None, lambda: True)
    assert 4 <= len(reasons) < 40 and len(list(tmp_path.glob("*.cubin"))) == len(reasons)
