"""Debug builds without a GPU: what they print, that they compile as planned, and how a record reads."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import fagen
from fagen import debug, sass
from fagen.compile import build
from fagen.debug import MAGIC, Record, Waiting, decode_record, instances_of, read_record, steps_of
from fagen.emit import emit
from fagen.emit.debug import BoundedWait, Delay, Progress, instrument
from fagen.errors import InputError
from fagen.plan import Plan
from fagen.plan.build import DEBUG_WORDS, assemble
from fagen.plan.steps import Elected, GetTile, Loop, Wait, bodies, walk

needs_nvdisasm = pytest.mark.skipif(sass.nvdisasm() is None, reason=f"no nvdisasm: {sass.INSTALL}")

SCHEDULES = {
    "fa3": ("fa3", {}),
    "fa3 causal, dynamic": ("fa3", {"mask": "causal", "parallelism": "persistent_dynamic", "tile_kv": 144}),
    "fa3 query_tiles": ("fa3", {"parallelism": "query_tiles"}),
    "1 consumer, none": (
        "fa3",
        {"consumers": 1, "tile_q": 64, "overlap": "none", "tile_kv": 128, "parallelism": "persistent_static"},
    ),
    "3 consumers, pingpong": ("fa3", {"head_dim": 64, "consumers": 3, "tile_q": 192, "tile_kv": 128, "overlap": "pingpong"}),
    "4 consumers, dynamic": (
        "fa3",
        {"head_dim": 64, "consumers": 4, "tile_q": 256, "tile_kv": 64, "parallelism": "persistent_dynamic"},
    ),
    "largest tile": ("fa3", {"mask": "causal", "tile_kv": 192, "stages": 1, "overlap": "pingpong"}),
    "uniform, dynamic": (
        "fa3",
        {"roles": "uniform", "overlap": "within", "tile_kv": 96, "mask": "causal", "parallelism": "persistent_dynamic"},
    ),
    "fa2": ("fa2", {}),
}


@cache
def planned(name: str, debug: bool = True) -> Plan:
    schedule, changes = SCHEDULES[name]
    return assemble(*fagen.load(schedule, **changes), debug=debug)


@pytest.fixture(params=SCHEDULES)
def each(request: pytest.FixtureRequest) -> Plan:
    return planned(request.param)


# ------------------------------------------------------------------------------------------------------------ what is printed


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_normal_build_has_none_of_it(name: str) -> None:
    normal, text = planned(name, debug=False), emit(planned(name, debug=False)).text
    assert not re.search("delay|progress|debug|seed|globaltimer|nanosleep|trap", text)
    assert all(s.name != "progress" for s in normal.kernels[0].smem)


def test_every_wait_is_bounded_and_every_synchronisation_delayed(each: Plan) -> None:
    (kernel,), text = each.kernels, emit(each).text
    steps = Counter(s.kind for s in steps_of(kernel))
    synchronising = sum(steps[kind.__name__] for kind in debug.SYNC_STEPS)
    assert synchronising and text.count("delay(delays);") == synchronising
    assert len(re.findall(r"\bmbarrier_wait<\d+>\(", text)) == steps["Wait"]
    assert "bra AGAIN" not in text  # the normal build's wait, which has no end
    marks = len(re.findall(r"\bprogress<\d+>\(", text))
    assert marks == (synchronising + len(kernel.roles) if kernel.mbars else 0)


def test_waits_and_marks_carry_the_index_of_their_step(each: Plan) -> None:
    (kernel,), text = each.kernels, emit(each).text
    steps = steps_of(kernel)
    marks = re.findall(r"progress<\d+>\((.+), (\d+)\);  // (\S+)", text)
    assert all(
        int(value) == 1 + len(steps) if title == "through" else steps[int(value) - 1].id == title for _, value, title in marks
    )
    waits = re.findall(r"// (\S+)\n\s+mbarrier_wait<\d+>\(\S+, (\w+).*\{(\d+), (\d+), (\w+), (\d+),", text)
    assert len(waits) == sum(isinstance(s, Wait) for s in steps)
    for title, _, kernel_index, role, _, step in waits:
        assert kernel_index == "0"
        assert steps[int(step)].id == title
        assert title.startswith(f"{kernel.roles[int(role)].name}.")


def test_only_single_threads_wait_alone(each: Plan) -> None:
    """All lanes of a warp vote on leaving a wait, so a thread that waits for itself must not ask the others."""
    (kernel,) = each.kernels
    for role in instrument(kernel, 0).roles:
        elected = {s.id for e in walk(role.body) if isinstance(e, Elected) for s in walk(e.body)}
        for step in walk(role.body):
            if isinstance(step, BoundedWait):
                assert step.one_thread == (role.elect or step.id in elected)


def test_the_tile_and_key_block_are_named_where_they_are_known() -> None:
    kernel = instrument(planned("fa3 causal, dynamic").kernels[0], 0)
    at = {s.id: s for s in (*walk(kernel.roles[0].body), *walk(kernel.roles[1].body)) if isinstance(s, BoundedWait)}

    def known(step: str) -> tuple[str, str]:
        return str(at[step].tile), str(at[step].key_block)

    assert known("producer.tiles.wait_tile_empty") == ("tile", "-1")
    assert known("consumer.tiles.wait_tile_full") == ("-1", "-1")  # the tile is what it waits for
    assert known("consumer.tiles.tile.wait_q_full") == ("tile", "-1")
    assert known("consumer.tiles.tile.steady.wait_k_full") == ("tile", "j")
    assert known("producer.tiles.tile.steady.wait_v_empty") == ("tile", "j")
    assert known("producer.tiles.tile.wait_v_empty") == ("tile", "-1")


def test_a_variable_of_an_inner_block_is_not_used_behind_it(each: Plan) -> None:
    """C scopes: a record may only mention variables declared in an enclosing block, before the wait."""

    def check(body: tuple, known: frozenset[str]) -> None:
        for step in body:
            if isinstance(step, BoundedWait):
                assert (step.tile.symbols() | step.key_block.symbols()) <= known
            if isinstance(step, GetTile) or step.kind in ("Let", "Var"):
                known |= {step.var}
            for _, inner in bodies(step):
                check(inner, known | ({step.var} if isinstance(step, Loop) else set()))

    for role in instrument(each.kernels[0], 0).roles:
        check(role.body, frozenset())


def test_the_program_itself_stays_the_same(each: Plan) -> None:
    (kernel,) = each.kernels
    for role, instrumented in zip(kernel.roles, instrument(kernel, 0).roles):
        rest = [s.id for s in walk(instrumented.body) if not isinstance(s, (Progress, Delay)) and s.kind != "StartDelays"]
        assert rest == [s.id for s in walk(role.body)]


def test_notes_of_progress_are_memory_of_their_own(each: Plan) -> None:
    (kernel,) = each.kernels
    notes = [s for s in kernel.smem if s.name == "progress"]
    if not kernel.mbars:
        assert not notes
        return
    (notes_,) = notes
    assert notes_.tile_bytes == 4 * len(instances_of(kernel))
    assert notes_.offset + notes_.tile_bytes == kernel.smem_bytes <= each.target.smem_bytes
    others = [(s.offset, s.tile_bytes * s.stages) for s in kernel.smem if s is not notes_] + [
        (b.offset, 8 * b.stages) for b in kernel.mbars
    ]
    assert all(start + size <= notes_.offset for start, size in others)
    assert debug.PROGRESS_WORD + len(instances_of(kernel)) <= DEBUG_WORDS


@needs_nvdisasm
@pytest.mark.parametrize("name", ["fa3", "4 consumers, dynamic", "largest tile", "uniform, dynamic", "fa2"])
def test_compiles_to_the_instructions_of_the_program(name: str) -> None:
    p = planned(name)
    report = build(p, emit(p), allow_spill_bytes=debug.SPILL_BYTES, use_cache=False).report.kernels[0]
    assert not report.serialised and not report.advisories
    assert report.sass is not None
    for instruction in ("HGMMA", "HMMA", "UTMALDG", "WARPGROUP.DEPBAR", "WARPGROUP.ARRIVE", "BAR.SYNC", "BAR.ARV", "LDGSTS"):
        assert report.sass.get(instruction, 0) == report.expected[instruction], instruction


# ----------------------------------------------------------------------------------------------------------------- the record


def index(plan: Plan, step: str) -> int:
    return [s.id for s in steps_of(plan.kernels[0])].index(step)


STUCK = "consumer.tiles.tile.steady.wait_k_full"


def stuck(plan: Plan) -> list[int]:
    """Consumer 1 waits for K; the words by hand, as the layout is documented."""
    words = [0] * DEBUG_WORDS
    words[:11] = [MAGIC, 0, 1, 1, index(plan, STUCK), 1, 0, 17, 3, 5, 256]
    words[11] = 1 + index(plan, "producer.tiles.tile.steady.wait_v_empty")
    words[12] = 1 + index(plan, "consumer.tiles.tile.sync_order")
    words[13] = 1 + index(plan, STUCK)
    return words


def test_the_steps_that_the_gpu_tests_leave_out_exist() -> None:
    """They are named by their ids, which a change of the program changes; those tests run on a device only."""
    path = Path(__file__).parents[1] / "gpu" / "test_debug_gpu.py"
    spec = importlib.util.spec_from_file_location("debug_gpu", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert len(module.HANGS) == 3
    for dropped, _ in module.HANGS:
        (kernel,) = module.broken(dropped).kernels  # asserts that there is such a step
        assert not any(s.id == dropped for r in kernel.roles for s in walk(r.body))


def test_a_record_says_who_waits_for_what() -> None:
    p = planned("fa3")
    assert decode_record(stuck(p), p) == (
        f"consumer 1 waits at {STUCK} for k_full[slot 1], phase 0 (tile 17, key block 3, CTA 5, thread 256); "
        "others: producer at producer.tiles.tile.steady.wait_v_empty (v_empty), "
        "consumer 0 at consumer.tiles.tile.sync_order (order[0])"
    )


def test_what_is_not_known_is_left_out() -> None:
    p, words = planned("fa3"), stuck(planned("fa3"))
    words[7] = words[8] = 0xFFFFFFFF
    words[11], words[12] = debug.NOT_STARTED, 1 + len(steps_of(p.kernels[0]))
    text = decode_record(words, p)
    assert text is not None
    assert "(CTA 5, thread 256)" in text
    assert text.endswith("others: producer not started, consumer 0 through")


def test_the_named_barrier_is_that_of_the_instance() -> None:
    p, words = planned("fa3"), stuck(planned("fa3"))
    words[3] = 0
    words[12], words[13] = words[13], 1 + index(p, "consumer.tiles.tile.steady.n_arrive_order")
    text = decode_record(words, p)
    assert text is not None and text.startswith("consumer 0 waits at")
    assert text.endswith("consumer 1 at consumer.tiles.tile.steady.n_arrive_order (order[0])")  # (1 + 1) % 2


def test_no_record_is_none() -> None:
    assert decode_record([0] * DEBUG_WORDS, planned("fa3")) is None
    assert decode_record((), planned("fa2")) is None


def test_words_and_record_are_inverse() -> None:
    p = planned("fa3")
    record = Record(Waiting(0, 1, 0, index(p, STUCK), 1, 1, -1, -1, 131, 128), (0, 5, 6))
    assert read_record(record.words, p) == record


@pytest.mark.parametrize(
    ("word", "value", "says"),
    [
        (0, 7, "word 0 is 0x7"),
        (1, 1, "kernel 1"),
        (2, 2, "not one of kernel attention"),
        (3, 2, "not one of kernel attention"),
        (4, 0, "not one of kernel attention"),  # a step, but not a wait
        (4, 10_000, "not one of kernel attention"),
        (12, 10_000, "not one of kernel attention"),
    ],
)
def test_words_of_something_else_are_refused(word: int, value: int, says: str) -> None:
    p, words = planned("fa3"), stuck(planned("fa3"))
    words[word] = value
    with pytest.raises(InputError, match=says):
        decode_record(words, p)


def test_too_few_words_are_refused() -> None:
    p = planned("fa3")
    for count in (5, 12):
        with pytest.raises(InputError, match="words"):
            decode_record(stuck(p)[:count], p)


def test_the_layout_in_c_is_the_layout_in_python() -> None:
    text = emit(planned("fa3")).text
    fields = [f.name for f in dataclasses.fields(Waiting)]
    assert f"int {', '.join(fields)};" in text
    stores = re.findall(r"record\[(\d+)\] = at\.(\w+);", text)
    assert stores == [(str(i), name) for i, name in enumerate(fields, 1)]
    assert f"record[{debug.PROGRESS_WORD} + i]" in text
    assert f"{MAGIC:#x}" in text and f"{debug.WAIT_LIMIT_NS}u" in text
