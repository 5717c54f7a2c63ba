"""The tuned table: what it holds, what is chosen from it, and that it survives its writers."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import fagen
from fagen import Attention, InputError, LaunchError, ScheduleError, load, sass, tuned
from fagen.compile import build
from fagen.emit import emit
from fagen.plan.kernel import Problem
from fagen.tuned import H200, Bucket, Entry, KnownDevice, Measured, Table, choose

A100 = KnownDevice("NVIDIA A100-SXM4-80GB", (8, 0), 108, 163 << 10)
RTX = KnownDevice("NVIDIA GeForce RTX 3090", (8, 6), 82, 99 << 10)
H100 = replace(H200, name="NVIDIA H100 80GB HBM3")
BLACKWELL = KnownDevice("NVIDIA B200", (10, 0), 148, 227 << 10)
(TABLE,) = tuned.builtin_tables()
SEEN = Measured("4,16,16,4096,4096", 800.0, "cudnn (torch)", 750.0, "NVIDIA H200", "580.1", "NVRTC 13.5.37", "0.1.0", "2026-11-29")


def paper(length: int, head_dim: int) -> Problem:
    heads = 2048 // head_dim
    return Problem(16384 // length, length, length, heads, heads)


def entry(
    length: int = 4096, tiles: str = "many", mask: str = "full", dtype: str = "bf16", head_dim: int = 128, **changes: Any
) -> Entry:
    attention, schedule = load("fa3", head_dim=head_dim, dtype=dtype, mask=mask, **changes)
    return Entry.make(attention, schedule, Bucket(length, tiles), "fa3", SEEN)


def table(*entries: Entry, device: str = "H200") -> Table:
    return Table("sm_90a", device, ()).with_entries(entries)


# what the table holds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("e", TABLE.entries, ids=lambda e: e.label)
def test_every_entry_is_the_legal_schedule_that_was_measured(e: Entry) -> None:
    assert e.attention.products == e.dtype and e.unusable(e.attention) == ""
    b, hq, hkv, sq, sk = map(int, e.measured.problem.split(","))
    assert Bucket.of(Problem(b, sq, sk, hq, hkv), H200.num_sms) == e.bucket
    assert e.measured.tflops > 100 and e.measured.gpu == "NVIDIA H200"


def test_the_table_covers_both_masks_at_every_head_dim_and_no_key_twice() -> None:
    keys = [e.key for e in TABLE.entries]
    assert len(set(keys)) == len(keys) and keys == sorted(keys)
    for wanted in product(("bf16", "e4m3"), (64, 128, 256), ("full", "causal")):
        lengths = {e.bucket.length for e in TABLE.entries if (e.dtype, e.head_dim, e.mask) == wanted}
        assert {512, 1024, 2048, 4096, 8192, 16384} <= lengths


UNIQUE = sorted({(e.attention, e.schedule) for e in TABLE.entries}, key=repr)


@pytest.mark.skipif(sass.nvdisasm() is None, reason=f"no nvdisasm: {sass.INSTALL}")
@pytest.mark.parametrize(("attention", "schedule"), UNIQUE, ids=lambda x: x.label if isinstance(x, Attention) else x.id)
def test_tuned_schedules_compile_with_every_promise_kept(attention: Attention, schedule: fagen.Schedule) -> None:
    p = fagen.plan(attention, schedule)
    assert not build(p, emit(p)).report.broken()


# buckets ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sk", "length"),
    [
        (0, 128),
        (1, 128),
        (181, 128),
        (182, 256),
        (512, 512),
        (724, 512),
        (725, 1024),
        (4096, 4096),
        (12000, 16384),
        (100000, 131072),
    ],
)
def test_lengths_round_in_ratio_to_a_power_of_two(sk: int, length: int) -> None:
    assert Bucket.of(Problem(1, 1, sk, 1, 1), 132).length == length


def test_few_tiles_are_fewer_than_sms() -> None:
    assert Bucket.of(Problem(1, 128 * 131, 1, 1, 1), 132).tiles == "few"
    assert Bucket.of(Problem(1, 128 * 131 + 1, 1, 1, 1), 132).tiles == "many"
    assert Bucket.of(Problem(66, 1, 1, 2, 1), 132).tiles == "many"
    assert Bucket.of(Problem(0, 5, 5, 1, 1), 132).tiles == "few"


# choosing -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("e", TABLE.entries, ids=lambda e: e.label)
def test_a_measured_problem_gets_its_own_entry(e: Entry) -> None:
    b, hq, hkv, sq, sk = map(int, e.measured.problem.split(","))
    got = choose(e.attention, Problem(b, sq, sk, hq, hkv), H200)
    assert got.entry == e and got.schedule == e.schedule
    assert got.why == f"the tuned table's entry for {e.label}, measured on H200"


@pytest.mark.parametrize(
    ("wanted", "nearest"),
    [
        ({"length": 2048}, {"length": 4096}),  # between 1024 and 4096: the longer
        ({"length": 128}, {"length": 512}),
        ({"length": 65536}, {"length": 16384}),
        ({"mask": "causal"}, {"mask": "full"}),
        ({"dtype": "fp16"}, {"dtype": "bf16"}),
        ({"tiles": "few"}, {"tiles": "many"}),
    ],
)
def test_the_nearest_entry_stands_in_and_says_so(wanted: dict[str, Any], nearest: dict[str, Any]) -> None:
    t = table(*(entry(n, tile_kv=kv) for n, kv in ((512, 80), (1024, 96), (4096, 112), (16384, 128))))
    ask = {"length": 4096, "mask": "full", "dtype": "bf16", "tiles": "many"} | wanted
    rows = 4096 if ask["tiles"] == "many" else 128
    problem = Problem(2, rows, ask["length"], 4, 4)
    got = choose(Attention(head_dim=128, dtype=ask["dtype"], mask=ask["mask"]), problem, H200, [t])
    assert got.entry is not None
    label = {"length": 4096, "mask": "full", "dtype": "bf16", "tiles": "many"} | nearest
    assert got.entry.label == f"hd128 {label['dtype']} {label['mask']}, seqlen_k {label['length']}, {label['tiles']} tiles"
    assert got.why.startswith("the tuned table has no entry for hd128") and f"the nearest is {got.entry.label}" in got.why


def test_what_differs_weighs_in_the_documented_order() -> None:
    """Device family, then dtype, mask, tiles; the length last."""
    problem = Problem(8, 4096, 4096, 16, 16)
    other_device = table(entry(4096, tile_kv=80), device="H100")
    mine = table(
        entry(4096, dtype="fp16", tile_kv=96),
        entry(4096, mask="causal", tile_kv=112),
        entry(4096, tiles="few", tile_kv=128),
        entry(512, tile_kv=144),
    )
    tables = [other_device, mine]
    for worse in (144, 128, 112, 96, 80):
        got = choose(Attention(head_dim=128), problem, H200, tables)
        assert got.schedule.tile_kv == worse
        tables = [replace(t, entries=tuple(e for e in t.entries if e != got.entry)) for t in tables]
    assert choose(Attention(head_dim=128), problem, H200, tables).entry is None


def test_another_hopper_takes_the_table_and_says_so() -> None:
    got = choose(Attention(head_dim=128), paper(4096, 128), H100)
    assert got.entry is not None
    assert "on NVIDIA H100 80GB HBM3; the nearest is" in got.why and got.why.endswith("measured on H200")


def test_another_head_dim_is_never_a_stand_in() -> None:
    got = choose(Attention(head_dim=64), paper(4096, 64), H200, [table(entry(4096))])
    assert got.entry is None and got.schedule == load("fa3", head_dim=64).schedule
    assert got.why == "the tuned table has nothing for hd64 bf16 full: the built-in fa3"


def test_e4m3_does_not_take_a_16_bit_entry() -> None:
    got = choose(Attention(head_dim=128, dtype="e4m3"), paper(4096, 128), H200, [table(entry(4096))])
    assert got.entry is None and got.schedule == load("fa3_fp8").schedule
    own = choose(Attention(head_dim=128, dtype="e4m3"), paper(4096, 128), H200)
    assert own.entry is not None and (own.entry.dtype, own.entry.base) == ("e4m3", "fa3_fp8")


def test_an_entry_that_is_not_legal_any_more_is_passed_over() -> None:
    broken = replace(entry(4096), changes=(("tile_kv", 100),))
    broken = replace(broken, schedule_id=broken.schedule.id)
    got = choose(Attention(head_dim=128), paper(4096, 128), H200, [table(broken, entry(512, tile_kv=96))])
    assert got.schedule.tile_kv == 96
    assert "passed over hd128 bf16 full, seqlen_k 4096, many tiles ([tile-kv]" in got.why


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schedule_id": "00000000"}, "00000000 was measured"),
        ({"base": "fa7"}, "no such schedule file or name"),
        ({"changes": (("tile_k", 96),)}, r"\[unknown-knob\]"),
    ],
)
def test_a_stale_entry_falls_back_to_the_built_in(change: dict[str, Any], reason: str) -> None:
    got = choose(Attention(head_dim=128), paper(4096, 128), H200, [table(replace(entry(4096), **change))])
    assert got.entry is None and got.schedule == load("fa3").schedule
    assert re.search(reason, got.why), got.why


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "e4m3"])
def test_every_attention_has_a_legal_schedule_at_every_length(head_dim: int, mask: str, dtype: str) -> None:
    attention = Attention(head_dim=head_dim, mask=mask, dtype=dtype)
    for batch, sq, sk in ((1, 1, 1), (1, 7, 48), (0, 5, 5), (1, 5, 0), (64, 1, 9000), (2, 3000, 3000), (1, 100000, 100000)):
        got = choose(attention, Problem(batch, sq, sk, 8, 2), H200)
        tuned.check(attention, got.schedule)


def test_devices_without_wgmma_take_fa2() -> None:
    got = choose(Attention(head_dim=128), paper(4096, 128), A100)
    assert got.schedule == load("fa2").schedule.replace(arch="sm_80") and got.entry is None
    assert "A100" in got.why and "no WGMMA" in got.why
    wide = choose(Attention(head_dim=256), paper(4096, 256), A100)
    assert (wide.schedule.tile_kv, wide.schedule.stages) == (32, 2), "64 keys need 192 KiB"
    wide = choose(Attention(head_dim=256), paper(4096, 256), RTX)
    assert (wide.schedule.tile_kv, wide.schedule.stages) == (32, 1) and "tile_kv=32, stages=1" in wide.why


def test_what_does_not_fit_a_device_is_said() -> None:
    small = replace(RTX, smem_bytes=64 << 10)
    with pytest.raises(LaunchError, match=r"hd256 bf16 full fits NVIDIA GeForce RTX 3090 .* 65536 bytes of .* at least 98816"):
        choose(Attention(head_dim=256), paper(4096, 256), small)
    with pytest.raises(LaunchError, match=r"e4m3 attention needs compute capability 9\.0"):
        choose(Attention(head_dim=128, dtype="e4m3"), paper(4096, 128), A100)
    with pytest.raises(LaunchError, match=r"no schedule runs on NVIDIA B200 \(compute capability 10.0\)"):
        choose(Attention(head_dim=128), paper(4096, 128), BLACKWELL)


@pytest.mark.parametrize("device", [H200, A100])
def test_an_attention_that_no_kernel_computes_is_a_schedule_error(device: KnownDevice) -> None:
    with pytest.raises(ScheduleError, match="not-yet"):
        choose(Attention(head_dim=128, softcap=30.0), paper(4096, 128), device)


# the file -----------------------------------------------------------------------------------------------------------------


def test_round_trip() -> None:
    text = tuned.builtin_path().read_text(encoding="utf-8")
    assert Table.from_json(text) == TABLE and TABLE.to_json() == text
    pair = table(entry(4096, tile_kv=80, stages=(3, 2)))
    assert Table.from_json(pair.to_json()) == pair


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": 99}', '{"schema": 1, "arch": "sm_90a", "device": "H200", "entries": [{}]}']
)
def test_what_is_no_table_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(InputError, match=str(path)):
        tuned.read(path)
    with pytest.raises(InputError, match=str(path)):
        tuned.record(path, [entry()], TABLE)
    assert path.read_text() == text


def test_record_replaces_by_key_and_begins_with_what_it_is_told(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    tuned.record(path, [entry(4096, tile_kv=96)], TABLE)
    assert len(tuned.read(path).entries) == len(TABLE.entries)
    again = tuned.record(path, [entry(4096, tile_kv=112), entry(256, tile_kv=80)], TABLE)
    assert again == tuned.read(path) and len(again.entries) == len(TABLE.entries) + 1
    assert choose(Attention(head_dim=128), paper(4096, 128), H200, [again]).schedule.tile_kv == 112
    assert os.listdir(tmp_path) == ["t.json"]


def test_record_refuses_the_table_of_other_devices(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    tuned.record(path, [entry()], table())
    with pytest.raises(InputError, match=r"is the table of H200 \(sm_90a\), not of H100"):
        tuned.record(path, [entry()], table(device="H100"))
    with pytest.raises(InputError, match="cannot be written"):
        tuned.record(tmp_path / "nowhere" / "t.json", [entry()], table())


def _write(path: str, lengths: list[int]) -> None:
    for n in lengths:
        tuned.record(path, [entry(n)], Table("sm_90a", "H200", ()))


def _write_for_ever(path: str) -> None:
    while True:
        _write(path, [128, 256, 512])


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    path, spawn = str(tmp_path / "t.json"), multiprocessing.get_context("spawn")
    lengths = [[1 << i for i in range(first, 24, 2)] for first in (7, 8)]
    writers = [spawn.Process(target=_write, args=(path, mine)) for mine in lengths]
    for w in writers:
        w.start()
    for w in writers:
        w.join(60)
    assert {e.bucket.length for e in tuned.read(path).entries} == {1 << i for i in range(7, 24)}


def test_a_killed_writer_leaves_a_whole_table(tmp_path: Path) -> None:
    path, spawn = tmp_path / "t.json", multiprocessing.get_context("spawn")
    writer = spawn.Process(target=_write_for_ever, args=(str(path),))
    writer.start()
    end = time.monotonic() + 60
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.05)
    os.kill(writer.pid or 0, signal.SIGKILL)
    writer.join(30)
    assert tuned.read(path).entries
    tuned.record(path, [entry(1 << 20)], TABLE)  # and no lock outlives it
    assert json.loads(path.read_text())["schema"] == tuned.SCHEMA
