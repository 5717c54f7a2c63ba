"""The synchronisation proof: accepts every legal plan, names what is wrong with hand-made kernels, and agrees with brute force."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from typing import Any

import pytest

import fagen
from fagen import Attention, Schedule
from fagen.plan import steps as S
from fagen.plan.build import assemble
from fagen.plan.expr import as_expr, eq, sym
from fagen.plan.kernel import KernelPlan, Problem
from fagen.plan.proof import Case, Cases, ProofResult, prove
from fagen.plan.proof.evaluate import Evaluator
from fagen.plan.proof.run import Run

FA2, FA3 = fagen.load("fa2"), fagen.load("fa3")
STAGES = (1, 2, 3, 4, (1, 2), (3, 1), (2, 4))


def prove_plan(attention: Attention, schedule: Schedule) -> ProofResult:
    (kernel,) = assemble(attention, schedule).kernels
    return prove(kernel, attention, schedule)


@pytest.mark.parametrize(
    "changes",
    [{"overlap": "none"}, {"overlap": "within"}, {"overlap": "within", "reference": "stale", "fuse_tiles": True}],
    ids=str,
)
def test_q_is_not_released_before_a_product_has_waited_for_it(changes: dict[str, Any]) -> None:
    """An arrival waits for no load: on an H200 the next tile's Q came into the slot before ldmatrix had read the last of it (head_dim 256 in
    e4m3, joined tiles of two blocks, while stores held up the shared-memory pipe)."""
    attention, schedule = FA3[0].replace(head_dim=64), FA3[1].replace(q_operand="registers", tile_kv=64, **changes)
    (kernel,) = assemble(attention, schedule).kernels
    assert prove(kernel, attention, schedule).ok
    (free, *_) = (s for r in kernel.roles for s in S.walk(r.body) if isinstance(s, S.Arrive) and s.bar == "q_empty")

    def early(step: S.Step) -> S.Body:
        if isinstance(step, S.LoadFrag):
            return step, replace(free, id="")
        return () if isinstance(step, S.Arrive) and step.bar == "q_empty" else (step,)

    roles = tuple(replace(r, body=S.rewritten(r.body, early)) for r in kernel.roles)
    result = prove(replace(kernel, roles=roles), attention, schedule)
    assert not result.ok and result.failures[0].kind == "race", result


# plans ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("parallelism", ["query_tiles", "persistent_static", "persistent_dynamic"])
@pytest.mark.parametrize("consumers", [1, 2, 3, 4])
def test_accepts_fa3(mask: str, parallelism: str, consumers: int) -> None:
    attention = FA3[0].replace(head_dim=64, mask=mask)
    base = FA3[1].replace(tile_q=64 * consumers, consumers=consumers, tile_kv=32, parallelism=parallelism)
    roles = [("producer", o) for o in ("none", "within", *(("pingpong", "both") if consumers > 1 else ()))]
    for number, (role, overlap) in enumerate([*roles, ("uniform", "none"), ("uniform", "within")]):
        turn = number + consumers + len(parallelism) + len(mask)  # so that, over all tests, each variant meets all stages
        schedule = base.replace(roles=role, overlap=overlap, stages=STAGES[turn % len(STAGES)])
        result = prove_plan(attention, schedule)
        assert result.ok, f"{schedule}\n{result}"


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("parallelism", ["query_tiles", "batch_heads"])
@pytest.mark.parametrize("warps", [1, 4])
def test_accepts_fa2(mask: str, parallelism: str, warps: int) -> None:
    for head_dim, tile_kv in ((64, 64), (128, 32)):
        for stages in STAGES:
            attention = FA2[0].replace(head_dim=head_dim, mask=mask)
            schedule = FA2[1].replace(parallelism=parallelism, stages=stages, warps=warps, tile_q=16 * warps, tile_kv=tile_kv)
            result = prove_plan(attention, schedule)
            assert result.ok, f"{schedule}\n{result}"


@pytest.mark.parametrize("name", ["fa2", "fa3"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_accepts_the_built_in_schedules(name: str, head_dim: int, mask: str) -> None:
    result = prove_plan(*fagen.load(name, head_dim=head_dim, mask=mask))
    assert result.ok, str(result)


def test_cases_reach_every_trip_count_and_tile_count() -> None:
    attention, schedule = FA3[0], FA3[1].replace(tile_kv=64, stages=(2, 3))
    (kernel,) = assemble(attention, schedule).kernels
    seen = set()
    for case in Cases(kernel, attention, schedule).all():
        blocks: list[int] = []

        def count(line: object, step: S.Step, blocks: list[int] = blocks) -> None:
            if isinstance(step, S.StoreRow) and line.w == 0:  # type: ignore[attr-defined]
                blocks.append(line.env["n"])  # type: ignore[attr-defined]

        Run(kernel, case.scope(kernel), "", Evaluator(), count).execute()
        seen |= {(len(blocks), n) for n in blocks}
    wanted = {(tiles, n) for tiles in (1, 2, 3) for n in (0, 1, 2 - 1, 2, 2 + 1, 2 * 2 + 1, 3, 3 + 1, 2 * 3 + 1)}
    assert wanted <= seen


def test_causal_cases_mix_trip_counts_in_one_cta() -> None:
    attention, schedule = FA3[0].replace(mask="causal"), FA3[1].replace(tile_kv=64)
    (kernel,) = assemble(attention, schedule).kernels
    mixed = set()
    for case in Cases(kernel, attention, schedule).all():
        seen: list[int] = []

        def count(line: object, step: S.Step, seen: list[int] = seen) -> None:
            if isinstance(step, S.StoreRow) and line.w == 0:  # type: ignore[attr-defined]
                seen.append(line.env["n"])  # type: ignore[attr-defined]

        Run(kernel, case.scope(kernel), "", Evaluator(), count).execute()
        mixed.add(tuple(seen))
    assert any(len(set(m)) == 3 for m in mixed) and any(0 in m and max(m) > 0 for m in mixed)


def test_is_quick() -> None:
    """It runs in every plan(): processor seconds, with much room for a busy machine."""
    (kernel,) = assemble(*FA3).kernels
    start = time.process_time()
    prove(kernel, *FA3)
    assert time.process_time() - start < 0.5


# hand-made kernels ------------------------------------------------------------------------------------------------------

TOY = Schedule(arch="sm_90a", tile_q=64, tile_kv=64, roles="producer", consumers=1, movement="tma", mma="wgmma")
ONE = [Case(Problem(1, 64, 64, 1, 1), 1, 0)]
TILE = S.Smem("K", 64, 64, "bf16", 1)
S_FRAG, O_FRAG = S.Frag("S", 64, 64, "fp32", "acc64"), S.Frag("O", 64, 64, "fp32", "acc64")


def kernel(
    *roles: S.Role, smem: tuple[S.Smem, ...] = (), mbars: tuple[S.MBar, ...] = (), nbars: tuple[S.NBar, ...] = ()
) -> KernelPlan:
    return KernelPlan(
        name="toy", threads=sum(r.threads for r in roles), min_ctas=1, gmem=(), pointers=(), params=(), maps=(), smem=smem,
        mbars=mbars, nbars=nbars, smem_bytes=0, grid=as_expr(1),
        roles=tuple(replace(r, body=S.number(r.body, r.name)) for r in roles),
    )  # fmt: skip


def role(
    name: str, *body: S.Step, warps: int = 4, elect: bool = False, count: int = 1, cursors: tuple[S.Cursor, ...] = ()
) -> S.Role:
    return S.Role(name, count, warps, elect, None, (S_FRAG, O_FRAG), cursors, body)


def load(seq: int, smem: str = "K", cursor: str | None = "load", full: str = "full") -> S.TmaLoad:
    return S.TmaLoad(
        src="k", dst=S.Slot(smem, cursor), full=full, seq=as_expr(seq), head=as_expr(0), batch=as_expr(0), hint="evict_first"
    )


def product(seq: int, cursor: str | None = "read", unit: str = "wgmma", d: str = "S", a: str | S.Slot | None = None) -> S.Mma:
    k = S.Slot("K", cursor, holds=as_expr(seq))
    return S.Mma(name="mma", d=d, a=k if a is None else a, b=k, accumulate=False, trans_b=False, unit=unit)  # type: ignore[arg-type]


def ring(
    stages: int, fills: int, consumers: int = 1, *, producer: tuple[S.Step, ...] = (), consumer: tuple[S.Step, ...] = ()
) -> KernelPlan:
    """A producer that fills a ring `fills` times and consumers that read each fill with an asynchronous product."""
    put: list[S.Step] = []
    take: list[S.Step] = []
    for i in range(fills):
        put += [S.Wait(bar="empty", cursor="load"), load(i), S.Advance(cursor="load")]
        take += [S.Wait(bar="full", cursor="read"), product(i), S.MmaWait(pending=0, ready=("S",))]
        take += [S.Arrive(bar="empty", cursor="read"), S.Advance(cursor="read")]
    return kernel(
        role("producer", *(producer or put), elect=True, cursors=(S.Cursor("load", stages, 1),)),
        role("consumer", *(consumer or take), count=consumers, cursors=(S.Cursor("read", stages, 0),)),
        smem=(replace(TILE, stages=stages),),
        mbars=(S.MBar("full", stages, 1, TILE.tile_bytes), S.MBar("empty", stages, 4 * consumers)),
    )


def fault(k: KernelPlan) -> tuple[str, str]:
    """(kind, message) of the first failure."""
    result = prove(k, Attention(head_dim=64), TOY, ONE)
    assert not result.ok and result.failures
    first = result.failures[0]
    return first.kind, first.message


def passes(k: KernelPlan) -> bool:
    result = prove(k, Attention(head_dim=64), TOY, ONE)
    assert result.ok == (not result.failures)
    return result.ok


def without(k: KernelPlan, id_: str) -> KernelPlan:
    """The kernel without one step (at the top level of its role)."""
    roles = tuple(replace(r, body=tuple(s for s in r.body if s.id != id_)) for r in k.roles)
    assert roles != k.roles, id_
    return replace(k, roles=roles)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("consumers", [1, 2])
def test_a_ring_is_accepted(stages: int, consumers: int) -> None:
    assert passes(ring(stages, 5, consumers))


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        ("consumer.wait_full", "race"),  # reads before the bytes are there
        ("producer.wait_empty.3", "race"),  # overwrites what is still read
        ("consumer.mma_wait", "race"),  # releases what is still read
        ("consumer.arrive_empty", "deadlock"),
        ("producer.tma_load", "deadlock"),
        ("producer.advance_load", "stale"),
    ],
)
def test_a_ring_without_a_step(step: str, kind: str) -> None:
    assert fault(without(ring(2, 4), step))[0] == kind


def test_an_arrival_that_nothing_waits_for_may_be_missing() -> None:
    assert passes(without(ring(2, 4), "consumer.arrive_empty.4"))


def test_releasing_before_the_product_is_done_is_a_race() -> None:
    k = ring(1, 2)
    take = list(k.roles[1].body)
    at = next(i for i, s in enumerate(take) if isinstance(s, S.MmaWait))
    take[at], take[at + 1] = take[at + 1], take[at]
    result = prove(ring(1, 2, consumer=tuple(take)), Attention(head_dim=64), TOY, ONE)
    (failure,) = result.failures
    assert failure.kind == "race" and "overwrites K[0] while consumer.mma may still read it" in failure.message
    assert failure.interleaving[-2:] == ("producer.tma_load.2", "consumer.mma completes")
    assert "consumer.arrive_empty" in failure.interleaving and "consumer.mma" in failure.interleaving
    assert failure.case == str(ONE[0])


def test_the_wrong_rows_in_a_slot_are_stale() -> None:
    k = ring(2, 3)
    body = tuple(product(7) if s.id == "consumer.mma.2" else s for s in k.roles[1].body)
    kind, message = fault(ring(2, 3, consumer=body))
    assert kind == "stale" and "expects (row 7" in message and "finds (row 1" in message


def test_a_parity_wait_that_can_alias() -> None:
    """A producer that announces three fills of one slot without waiting: the reader's parity cannot tell phase 0 from phase 2."""
    body = (load(0), S.Advance(cursor="load"), load(1), S.Advance(cursor="load"), load(2), S.Advance(cursor="load"))
    watch: tuple[S.Step, ...] = (S.Wait(bar="full", cursor="read"),)
    kind, message = fault(ring(1, 1, producer=body, consumer=watch))
    assert kind in ("alias", "phase", "race")
    assert "full" in message or "K[0]" in message


def test_a_wait_that_begins_a_phase_early_aliases() -> None:
    """Two advances for one use: the wait means phase 1 while phase 0 may be open, and parity 1 lets it pass at once."""
    consumer = (S.Advance(cursor="read"), S.Wait(bar="full", cursor="read"), product(1), S.MmaWait(pending=0, ready=("S",)))
    producer = (load(0), S.Advance(cursor="load"), load(1), S.Advance(cursor="load"))
    result = prove(ring(1, 2, producer=producer, consumer=consumer), Attention(head_dim=64), TOY, ONE)
    assert "alias" in {f.kind for f in result.failures}


def test_counts_of_a_barrier() -> None:
    good = ring(2, 3)
    full, empty = good.mbars
    for bars, kinds in (
        ((replace(full, tx_bytes=full.tx_bytes - 16), empty), ("bytes",)),
        ((replace(full, arrivals=2), empty), ("deadlock",)),
        ((full, replace(empty, arrivals=3)), ("arrivals",)),
        ((full, replace(empty, arrivals=5)), ("arrivals", "deadlock")),
        ((replace(full, arrivals=0), empty), ("arrivals",)),
    ):
        assert fault(replace(good, mbars=bars))[0] in kinds


def test_every_warp_of_the_instance_arrives() -> None:
    """The count of a barrier is in warps: four a warpgroup, one for a single thread."""
    good = ring(2, 3, consumers=3)
    assert passes(good) and good.mbars[1].arrivals == 12


# ping-pong, named barriers


def turns(*bodies: tuple[S.Step, ...], threads: int = 256, first_id: int = 1, count: int = 2) -> KernelPlan:
    roles = [role(f"r{i}", *b) for i, b in enumerate(bodies)]
    return kernel(*roles, nbars=(S.NBar("order", first_id, count, threads),))


def sync(i: int) -> S.Sync:
    return S.Sync(bar="order", index=as_expr(i))


def narrive(i: int) -> S.NArrive:
    return S.NArrive(bar="order", index=as_expr(i))


def test_two_warpgroups_in_turn() -> None:
    a, b = (sync(0), narrive(1)), (sync(1), narrive(0))
    assert passes(turns((*a, *a, sync(0)), (narrive(0), *b, *b)))
    assert fault(turns((*a, *a), (narrive(0), *b, *b)))[0] == "left-over"
    assert fault(turns((*a, *a, sync(0)), (*b, *b)))[0] == "deadlock"
    assert fault(turns((*a, *a, sync(0)), (narrive(0), *b, *b), threads=384))[0] == "deadlock"
    assert fault(turns((*a, *a, sync(0)), (narrive(0), *b, *b), threads=224))[0] == "generation"


def test_an_arrival_that_may_count_for_the_generation_before() -> None:
    """Three warpgroups at a barrier of two: who meets whom depends on timing."""
    result = prove(turns((sync(0), sync(0)), (sync(0),), (sync(0),)), Attention(head_dim=64), TOY, ONE)
    assert not result.ok and result.failures[0].kind == "phase"


def test_named_barrier_ids() -> None:
    a, b = (sync(0),), (sync(0),)
    assert fault(turns(a, b, first_id=15))[0] == "barrier-id"
    assert fault(turns(a, b, first_id=0))[0] == "barrier-id"
    assert passes(turns(a, b, first_id=14))
    assert fault(turns((sync(2),), (sync(2),)))[0] == "slot"


# registers


def uses(*body: S.Step) -> KernelPlan:
    """One warpgroup; K is there from the start of the body."""
    fill = (load(0), S.Advance(cursor="load"))
    wait = S.Wait(bar="full", cursor="read")
    return ring(1, 1, producer=fill, consumer=(wait, *body))


ZERO, RESCALE = S.Fill(dst="O", value=0.0), S.Pack(p="O", s="S")
WAIT = S.MmaWait(pending=0, ready=("S",))


def test_registers_of_a_product_in_flight() -> None:
    assert passes(uses(product(0), WAIT, RESCALE))
    assert fault(uses(product(0), RESCALE, WAIT))[0] == "registers"
    assert fault(uses(product(0), S.Fill(dst="S", value=0.0), WAIT))[0] == "registers"
    assert passes(uses(product(0), product(0), WAIT)), "a product may continue into the same accumulator"
    with_operand = product(0, d="S", a="O")
    both = S.MmaWait(pending=0, ready=("S", "O"))
    assert passes(uses(ZERO, with_operand, both))
    assert fault(uses(ZERO, with_operand, ZERO, both))[0] == "registers"
    assert fault(uses(with_operand, both)) == ("registers", "consumer.mma reads O before anything has written it")


def test_a_wait_names_exactly_what_it_completes() -> None:
    assert fault(uses(product(0), S.MmaWait(pending=0, ready=())))[0] == "ready"
    assert fault(uses(product(0), S.MmaWait(pending=0, ready=("S", "O"))))[0] == "ready"
    assert fault(uses(product(0), S.MmaWait(pending=1, ready=("S",))))[0] == "ready"
    assert passes(uses(product(0), product(0, d="O"), S.MmaWait(pending=1, ready=("S",)), S.MmaWait(pending=0, ready=("O",))))
    kind, message = fault(uses(product(0)))
    assert kind == "in-flight" and message == "consumer ends while consumer.mma is in flight"


# cp.async, fences, the CTA barrier


def copies(*body: S.Step, count: int = 2, unit: str = "mma_sync") -> KernelPlan:
    warps = 1 if unit == "mma_sync" else 4
    return kernel(role("warps", *body, warps=warps, count=count, cursors=()), smem=(TILE,))


COPY = S.CpAsync(src="k", dst=S.Slot("K", None), seq=as_expr(0), limit=as_expr(64), head=as_expr(0), batch=as_expr(0))
COMMIT, DRAIN, CTA = S.CpCommit(), S.CpWait(pending=0), S.CtaSync()
USE = product(0, cursor=None, unit="mma_sync")


def test_copies_are_visible_past_wait_and_barrier() -> None:
    assert passes(copies(COPY, COMMIT, DRAIN, CTA, USE))
    for wrong in ((COPY, COMMIT, DRAIN, USE), (COPY, COMMIT, CTA, DRAIN, USE), (COPY, DRAIN, COMMIT, CTA, USE)):
        assert fault(copies(*wrong))[0] == "race"
    assert fault(copies(COPY, COMMIT, DRAIN, USE, count=1))[0] == "race", "other lanes' parts need a barrier even in one warp"
    again = replace(COPY, seq=as_expr(64))
    use_again = product(64, cursor=None, unit="mma_sync")
    assert passes(copies(COPY, COMMIT, DRAIN, CTA, USE, CTA, again, COMMIT, DRAIN, CTA, use_again))
    assert fault(copies(COPY, COMMIT, DRAIN, CTA, USE, again, COMMIT, DRAIN, CTA, use_again))[0] == "race"
    assert fault(copies(COPY, COMMIT, again, COMMIT, S.CpWait(pending=1), CTA, USE))[0] in ("race", "in-flight")


def test_copies_in_flight_at_the_end() -> None:
    kind, message = fault(copies(COPY, COMMIT))
    assert kind == "in-flight" and "after the CTA has ended" in message


def test_ordinary_writes_reach_wgmma_past_a_fence_of_the_writer() -> None:
    use = (product(0, cursor=None), WAIT)
    assert passes(copies(COPY, COMMIT, DRAIN, S.ProxyFence(), CTA, *use, count=1, unit="wgmma"))
    for wrong in (
        (COPY, COMMIT, DRAIN, CTA, *use),
        (COPY, COMMIT, DRAIN, CTA, S.ProxyFence(), *use),
        (S.ProxyFence(), COPY, COMMIT, DRAIN, CTA, *use),
        (COPY, COMMIT, S.ProxyFence(), DRAIN, CTA, *use),
    ):
        assert fault(copies(*wrong, count=1, unit="wgmma"))[0] == "proxy"


def test_the_cta_barrier_needs_everybody() -> None:
    assert passes(kernel(role("a", CTA), role("b", CTA)))
    assert fault(kernel(role("a", CTA, CTA), role("b", CTA)))[0] == "deadlock"


# one thread of a warpgroup


def uniform(*body: S.Step) -> KernelPlan:
    """One warpgroup that loads for itself by an elected thread; slots are released by its four warps."""
    cursors = (S.Cursor("load", 1, 1), S.Cursor("read", 1, 0))
    bars = (S.MBar("full", 1, 1, TILE.tile_bytes), S.MBar("empty", 1, 4))
    return kernel(role("wg", *body, cursors=cursors), smem=(TILE,), mbars=bars)


def test_an_elected_thread_waits_for_the_other_warps() -> None:
    """Its own warp is done with the slot, but that says nothing of the other three."""

    def fetch(i: int, *, wait: bool = True) -> S.Elected:
        first: S.Body = (S.Wait(bar="empty", cursor="load"),) if wait else ()
        return S.Elected(body=(*first, load(i), S.Advance(cursor="load")))

    def use(i: int) -> S.Body:
        get = (S.Wait(bar="full", cursor="read"), product(i), WAIT)
        return (*get, S.Arrive(bar="empty", cursor="read"), S.Advance(cursor="read"))

    assert passes(uniform(fetch(0), *use(0), fetch(1), *use(1)))
    assert fault(uniform(fetch(0), *use(0), fetch(1, wait=False)))[0] == "race"
    assert fault(uniform(load(0), *use(0)))[0] == "who"
    wait_alone = S.Elected(body=(S.Wait(bar="full", cursor="read"),))
    get, *rest = use(0)
    assert fault(uniform(fetch(0), wait_alone, *rest))[0] == "race", "what thread 0 has waited for, the other warps have not"
    assert fault(uniform(fetch(0), *use(0), S.Advance(cursor="load")))[0] == "elected"
    assert get == S.Wait(bar="full", cursor="read")


# the tile counter


def test_the_counter_is_reset_after_all_claims() -> None:
    claim, reset = S.ClaimTile(var="next", counter="counter"), S.ResetCounter(counter="counter")
    assert passes(kernel(role("p", claim, claim, reset, elect=True)))
    assert fault(kernel(role("p", claim, reset, claim, elect=True)))[0] == "counter"
    assert fault(kernel(role("p", claim, elect=True)))[0] == "counter"
    assert fault(kernel(role("p", claim, elect=True), role("q", reset, elect=True)))[0] == "counter"


def test_a_loop_that_never_breaks() -> None:
    forever = S.Forever(body=(S.Break(cond=eq(sym("w"), 1)),))
    assert fault(kernel(role("p", forever, elect=True)))[0] == "endless"


def test_an_unknown_step_is_our_fault() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Teleport(S.Step):
        pass

    with pytest.raises(fagen.InternalError, match="Teleport"):
        prove(kernel(role("p", Teleport())), Attention(head_dim=64), TOY, ONE)


# brute force ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """Where every role stands, and all that the hardware remembers."""

    pcs: tuple[int, ...]
    mbars: tuple[tuple[int, int, int], ...]
    """(phases completed, arrivals of this phase, bytes announced and not landed)."""
    landing: frozenset[tuple[int, int]]
    """Loads (role, pc) in flight."""
    reading: frozenset[tuple[int, int]]
    """Products (role, pc) in flight."""
    slots: tuple[int, ...]
    """First row of what each slot holds; −1: nothing, or torn."""


class Explorer:
    """Every interleaving of straight-line roles (four-warp instances move as one), asynchronous completions as moves of their own.

    `parity`: a wait looks at the parity bit, as the hardware does; else at the number of the phase it means.
    """

    def __init__(self, k: KernelPlan, parity: bool) -> None:
        self.k, self.parity = k, parity
        self.bars = [(b.name, i) for b in k.mbars for i in range(b.stages)]
        self.programs = [self._positions(r) for r in k.roles]
        self.dead = self.bad = False

    @staticmethod
    def _positions(r: S.Role) -> list[tuple[S.Step, int, int]]:
        """Steps with the slot and the pass over the ring of the role's one cursor."""
        (cursor,) = r.cursors
        n, out = 0, []
        for step in r.body:
            if isinstance(step, S.Advance):
                n += 1
            else:
                out.append((step, n % cursor.stages, n // cursor.stages - cursor.start_phase))
        return out

    def run(self, limit: int = 60_000) -> bool:
        """Explore; False if there were too many states to see them all."""
        start = State(
            (0,) * len(self.programs), ((0, 0, 0),) * len(self.bars), frozenset(), frozenset(), (-1,) * self.k.smem[0].stages
        )
        seen, todo = {start}, [start]
        while todo:
            state = todo.pop()
            following = list(self._moves(state))
            if not following and any(pc < len(p) for pc, p in zip(state.pcs, self.programs)):
                self.dead = True
            for s in following:
                if s not in seen:
                    seen.add(s)
                    todo.append(s)
            if len(seen) > limit:
                return False
        return True

    def _moves(self, s: State):  # type: ignore[no-untyped-def]
        for load_ in s.landing:
            step, slot, _ = self.programs[load_[0]][load_[1]]
            slots = (*s.slots[:slot], step.seq.eval({}), *s.slots[slot + 1 :])
            bars = self._bar(s.mbars, ("full", slot), landed=TILE.tile_bytes)
            yield replace(s, landing=s.landing - {load_}, slots=slots, mbars=bars)
        for read in s.reading:
            if not self._holds(s, read):
                self.bad = True
            yield replace(s, reading=s.reading - {read})
        for r, pc in enumerate(s.pcs):
            if pc < len(self.programs[r]):
                step, slot, phase = self.programs[r][pc]
                after = self._step(replace(s, pcs=(*s.pcs[:r], pc + 1, *s.pcs[r + 1 :])), (r, pc), step, slot, phase)
                if after is not None:
                    yield after

    def _step(self, s: State, me: tuple[int, int], step: S.Step, slot: int, phase: int) -> State | None:
        if isinstance(step, S.Wait):
            done = s.mbars[self.bars.index((step.bar, slot))][0]
            passed = (done - 1) % 2 == phase % 2 if self.parity else done > phase
            return s if passed else None
        if isinstance(step, S.Arrive):
            return replace(s, mbars=self._bar(s.mbars, (step.bar, slot), arrivals=4))
        if isinstance(step, S.TmaLoad):
            busy = any(self.programs[r][pc][1] == slot for r, pc in s.reading | s.landing)
            self.bad |= busy
            bars = self._bar(s.mbars, (step.full, slot), arrivals=1, announced=TILE.tile_bytes)
            return replace(s, mbars=bars, landing=s.landing | {me}, slots=(*s.slots[:slot], -1, *s.slots[slot + 1 :]))
        if isinstance(step, S.Mma):
            if not self._holds(s, me):
                self.bad = True
            return replace(s, reading=s.reading | {me})
        assert isinstance(step, S.MmaWait)
        return None if any(r == me[0] for r, _ in s.reading) else s

    def _holds(self, s: State, read: tuple[int, int]) -> bool:
        step, slot, _ = self.programs[read[0]][read[1]]
        return s.slots[slot] == step.b.holds.eval({})

    def _bar(self, bars, bar, arrivals=0, announced=0, landed=0):  # type: ignore[no-untyped-def]
        at = self.bars.index(bar)
        done, arrived, tx = bars[at]
        arrived, tx = arrived + arrivals, tx + announced - landed
        expected = self.k.mbar_of(bar[0]).arrivals
        if arrived >= expected and tx == 0:
            done, arrived = done + 1, arrived - expected
        return (*bars[:at], (done, arrived, tx), *bars[at + 1 :])


def random_ring(rng: random.Random) -> KernelPlan:
    """A ring with up to three edits of its roles' steps."""
    k = ring(rng.choice([1, 2]), rng.choice([2, 3, 4]), rng.choice([1, 1, 2]))
    if len(k.roles) == 2 and k.roles[1].count == 2:  # two roles of one instance, so that edits may treat them apart
        producer, consumer = k.roles
        consumer = replace(consumer, count=1)
        k = replace(k, roles=(producer, consumer, replace(consumer, name="other")))
    roles = list(k.roles)
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        at = rng.randrange(len(roles))
        body = list(roles[at].body)
        i = rng.randrange(len(body) - 1)
        edit = rng.choice(["drop", "swap", "double"])
        if edit == "drop":
            del body[i]
        elif edit == "swap":
            body[i], body[i + 1] = body[i + 1], body[i]
        elif not isinstance(body[i], (S.TmaLoad, S.Mma)):
            body.insert(i, body[i])
        roles[at] = replace(roles[at], body=tuple(body))
    return replace(k, roles=tuple(replace(r, body=S.number(r.body, r.name)) for r in roles))


def test_agrees_with_brute_force() -> None:
    """What the proof accepts neither hangs nor tears in any interleaving; what it calls a deadlock is one."""
    rng = random.Random(20)
    accepted = deadlocks = torn = 0
    for number in range(300):
        k = random_ring(rng)
        result = prove(k, Attention(head_dim=64), TOY, ONE)
        real, meant = Explorer(k, parity=True), Explorer(k, parity=False)
        if not (real.run() and meant.run()):
            continue
        if result.ok:
            accepted += 1
            assert not (real.dead or real.bad or meant.dead or meant.bad), f"{number}: accepted, but can go wrong"
        else:
            torn += real.bad
            if result.failures[0].kind == "deadlock":
                deadlocks += 1
                assert meant.dead, f"{number}: {result}"
        assert not (meant.dead and result.ok)
    assert accepted > 40 and deadlocks > 40 and torn > 40, (accepted, deadlocks, torn)


def can_hang(bodies: list[tuple[S.Step, ...]], threads: int) -> tuple[bool, bool]:
    """(some interleaving hangs, some interleaving overfills a barrier) of warpgroups that only use two named barriers."""
    start = ((0,) * len(bodies), (None,) * len(bodies), ((0, 0), (0, 0)))
    seen, todo, hangs, overfills = {start}, [start], False, False
    while todo:
        pcs, waiting, bars = todo.pop()
        following = []
        for r, body in enumerate(bodies):
            if pcs[r] == len(body):
                continue
            step = body[pcs[r]]
            assert isinstance(step, (S.Sync, S.NArrive))
            i = step.index.eval({})
            generation, arrived = bars[i]
            here: int | None = None
            after, onward = bars, True
            if waiting[r] is None:
                arrived += 128
                overfills |= arrived > threads
                generation_after, arrived = (generation + 1, 0) if arrived >= threads else (generation, arrived)
                after = (*bars[:i], (generation_after, arrived), *bars[i + 1 :])
                if isinstance(step, S.Sync):
                    here, onward = generation, False
            elif generation == waiting[r]:
                continue
            next_pcs = (*pcs[:r], pcs[r] + onward, *pcs[r + 1 :])
            following.append((next_pcs, (*waiting[:r], here, *waiting[r + 1 :]), after))
        hangs |= not following and any(pc < len(b) for pc, b in zip(pcs, bodies))
        for s in following:
            if s not in seen:
                seen.add(s)
                todo.append(s)
    return hangs, overfills


def test_agrees_with_brute_force_on_named_barriers() -> None:
    rng = random.Random(3)
    accepted = deadlocks = 0
    for number in range(400):
        rounds = rng.choice([1, 2])
        a, b = (sync(0), narrive(1)) * rounds + (sync(0),), (narrive(0),) + (sync(1), narrive(0)) * rounds
        bodies = [list(a), list(b)]
        for _ in range(rng.choice([0, 1, 2])):
            body = rng.choice(bodies)
            i = rng.randrange(len(body))
            body[i : i + 1] = rng.choice([[], [sync(rng.randrange(2))], [narrive(rng.randrange(2))], [body[i], sync(0)]])
            if not body:
                body.append(sync(0))
        if rng.random() < 0.3:
            bodies.append([rng.choice([sync, narrive])(rng.randrange(2)) for _ in range(rng.choice([1, 2]))])
        k = turns(*(tuple(x) for x in bodies))
        result = prove(k, Attention(head_dim=64), TOY, ONE)
        hangs, overfills = can_hang([r.body for r in k.roles], 256)
        if result.ok:
            accepted += 1
            assert not hangs and not overfills, f"{number}: accepted, but can hang"
        elif result.failures[0].kind == "deadlock":
            deadlocks += 1
            assert hangs, f"{number}: {result}"
    assert accepted > 40 and deadlocks > 40, (accepted, deadlocks)
