"""The steps that go through memory or between warps, and the order in which they may.

Copies through registers and stores to shared memory are ordinary writes: each thread knows of its own, the others learn of them at a
barrier. A workspace is read and written by the CTA that owns its rows: every two accesses to the same rows and columns, one of them a
write, must be ordered, and what is read must have been written (unless another kernel writes it). The registers' image of a tile
(`StoreAcc`, `LoadAcc`) is read back by the threads that wrote it; a row vector by other lanes and other warps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import quantise_steps as Q
from .. import steps as S
from .memory import alone, new_fill, part, shared_fill, slot_key, touch
from .state import Failure, Fill, Line, Read, SlotKey, name

if TYPE_CHECKING:
    from .run import Run

Region = tuple[str, int, int, int, int]
"""(workspace, batch, head, first row, first column)."""


class Access(NamedTuple):
    start: int
    end: int
    write: bool
    line: int
    step: S.Step


# shared memory ----------------------------------------------------------------------------------------------------------


def _copy(run: Run, line: Line, step: S.Copy) -> None:
    alone(run, line, step, False)
    key = slot_key(run, line, step, step.dst)
    issue = run.event(line, step)
    mine = new_fill(run, line, step, key, run.writers[line.role.name], asynchronous=False)
    shared_fill(run, line, step, key, mine, issue, _stored(run, line, step, issue))
    for region in _of_copy(run, line, step):
        run.accesses.setdefault(region, []).append(Access(issue, issue, False, line.index, step))


def _of_copy(run: Run, line: Line, step: S.Copy) -> Iterator[Region]:
    if step.src in run.spaces:
        yield _region(run, line, step, step.src, step.seq, step.col)


def _stored(run: Run, line: Line, step: S.Step, issue: int) -> int:
    """The end of an ordinary store: known to the thread itself until a barrier."""
    end = run.order.add(line.label(step, "is stored"), run.order.masks[issue])
    line.own |= run.order.masks[end]
    return end


def _prefill(run: Run, line: Line, step: S.Prefill) -> None:
    """Every line of the role stores a part of every slot. What the slots hold is no tensor's rows: no reader can ask for any."""
    alone(run, line, step, False)
    issue = run.event(line, step)
    end = _stored(run, line, step, issue)
    for slot in range(run.smem[step.smem].stages):
        mine = Fill(step, False, 0, None, None, (0, 0), run.writers[line.role.name])
        shared_fill(run, line, step, (step.smem, slot), mine, issue, end)


def _store_part(run: Run, line: Line, step: S.StoreStats | S.StoreFrag | Q.ShareMax | Q.ShareColumns) -> None:
    """The instance's own part of a ring that all instances fill: a slot of its own."""
    touch(run, line, step)
    key = _part_key(run, step.dst, line.w)
    issue = run.event(line, step)
    fill = Fill(step, False, len(run.fills.get(key, ())), None, None, (0, 0))
    if isinstance(step, S.StoreFrag):
        run.part_columns[key[0]] = next(f.cols for f in line.role.frags if f.name == step.src)
    part(run, line, fill, issue, _stored(run, line, step, issue))
    run.fills.setdefault(key, []).append(fill)


def _part_key(run: Run, slot: S.Slot, w: int) -> SlotKey:
    return f"{slot.smem} from column {slot.col}" if slot.col else slot.smem, w


def _merge(run: Run, line: Line, step: S.MergeStats | S.AddParts | Q.TakeMax | Q.StoreColumns) -> None:
    """Reads all instances' parts: those of the block whose own part the instance stored last."""
    touch(run, line, step)
    e = run.event(line, step)
    chunks = {k for k, w in run.fills if w == line.w and k.split(" ")[0] == step.src.smem}
    stored = {len(run.fills[k, line.w]) for k in chunks}
    columns = run.smem[step.src.smem].cols
    if len(stored) != 1 or isinstance(step, S.AddParts) and sum(run.part_columns[k] for k in chunks) != columns:
        run.refuse("parts", line, step, f"merges parts in {step.src.smem} of which it has not stored its own")
    for chunk in sorted(chunks):
        mine = len(run.fills[chunk, line.w]) - 1
        for w in range(line.role.count):
            key = chunk, w
            fills = run.fills.get(key, [])
            seen = [i for i, f in enumerate(fills) if not f.ends_mask & ~run.order.masks[e]]
            if mine not in seen:
                late = tuple(fills[mine].ends) if mine < len(fills) else ()
                run.fail("race", f"{line.label(step)} reads {name(key)} before it is stored", run.order.witness(e, *late))
            fills[mine].reads.append(Read(e, e, step))
            if len(fills) > mine + 1:
                late = tuple(fills[mine + 1].issues)
                run.fail("race", f"{line.label(step)} reads {name(key)} after its next part", run.order.witness(e, *late))


# workspaces -------------------------------------------------------------------------------------------------------------


def _region(run: Run, line: Line, step: Any, space: str, row: Any, col: Any) -> Region:
    at = [run.evaluate(e, line.env) for e in (step.batch, step.head, row)]
    return space, at[0], at[1], at[2], 0 if col is None else run.evaluate(col, line.env)


def _store_acc(run: Run, line: Line, step: S.StoreAcc) -> None:
    touch(run, line, step)
    e = run.event(line, step)
    _access(run, _region(run, line, step, step.dst, step.first_row, step.col), Access(e, e, True, line.index, step))


def _load_acc(run: Run, line: Line, step: S.LoadAcc) -> None:
    touch(run, line, step)
    e = run.event(line, step)
    _access(run, _region(run, line, step, step.src, step.first_row, step.col), Access(e, e, False, line.index, step))


def _store_row(run: Run, line: Line, step: S.StoreRow) -> None:
    """One lane of four writes: to the others of its own warp too it is known only after a barrier."""
    touch(run, line, step)
    if step.dst in run.spaces:
        issue = run.event(line, step)
        end = _stored(run, line, step, issue)
        _access(run, _region(run, line, step, step.dst, step.first_row, None), Access(issue, end, True, line.index, step))


def _load_row(run: Run, line: Line, step: S.LoadRow) -> None:
    touch(run, line, step)
    e = run.event(line, step)
    _access(run, _region(run, line, step, step.src, step.first_row, None), Access(e, e, False, line.index, step))


def _access(run: Run, region: Region, access: Access) -> None:
    run.accesses.setdefault(region, []).append(access)


def regions(run: Run) -> Iterator[Failure]:
    """Accesses to one region of a workspace, in the order of the run: a legal one, so what is ordered is ordered that way."""
    order = run.order
    mine = {s.dst for r in run.kernel.roles for s in S.walk(r.body) if isinstance(s, (S.StoreAcc, S.StoreRow))}
    for region, found in run.accesses.items():
        space, *at = region
        where = f"{space}[batch {at[0]}, head {at[1]}, row {at[2]}]"
        last_write: Access | None = None
        since: list[Access] = []
        for access in found:
            if isinstance(access.step, (S.LoadAcc, S.LoadRow)) and (space in mine or isinstance(access.step, S.LoadAcc)):
                again = isinstance(access.step, S.LoadAcc) and any(a.step.kind == "LoadAcc" for a in since)
                if last_write is None or again:
                    since_when = "since it was read last" if again else ""
                    yield Failure(
                        "stale", f"{access.step.id} reads {where}, which nothing has written {since_when}".rstrip(), run.case
                    )
            earlier = ([last_write] if last_write else []) + (since if access.write else [])
            for before in earlier:
                if not order.before(before.end, access.start):
                    message = f"{access.step.id} and {before.step.id} use {where} in no order"
                    yield Failure("race", message, run.case, order.witness(access.start, before.end))
            if access.write:
                last_write, since = access, []
            else:
                since.append(access)


# rows that a lane keeps in shared memory -----------------------------------------------------------------------------------


def _stage(run: Run, line: Line, step: Q.StageRows) -> None:
    """An asynchronous copy that concerns the line alone, but each lane its part of it."""
    alone(run, line, step, False)
    issue = run.event(line, step)
    end = run.order.add(line.label(step, "lands"), run.order.masks[issue])
    line.copies.append(end)
    fill = Fill(step, False, run.evaluate(step.first_row, line.env), None, None, (0, 0))
    part(run, line, fill, issue, end)
    run.fills.setdefault((step.dst.smem, line.w), []).append(fill)


def _use_rows(run: Run, line: Line, step: Q.AbsMax | Q.QuantiseRows) -> None:
    touch(run, line, step)
    if not isinstance(step.x, Q.Staged):
        return
    e = run.event(line, step)
    key = step.x.smem, line.w
    fills = run.fills.get(key, [])
    if not fills or fills[-1].ends_mask & ~run.order.masks[e]:
        late = tuple(fills[-1].ends) if fills else ()
        run.fail("race", f"{line.label(step)} reads {name(key)} before it is filled", run.order.witness(e, *late))
    if fills[-1].seq != run.evaluate(step.first_row, line.env):
        run.refuse("stale", line, step, f"expects other rows than {fills[-1].step.id} has staged")
    fills[-1].reads.append(Read(e, e, step))


HANDLERS: dict[type[S.Step], Callable[[Run, Line, Any], None]] = {
    S.Copy: _copy,
    S.Prefill: _prefill,
    S.StoreStats: _store_part,
    S.StoreFrag: _store_part,
    S.MergeStats: _merge,
    S.AddParts: _merge,
    S.StoreAcc: _store_acc,
    S.LoadAcc: _load_acc,
    S.StoreRow: _store_row,
    S.LoadRow: _load_row,
    Q.StageRows: _stage,
    Q.AbsMax: _use_rows,
    Q.QuantiseRows: _use_rows,
    Q.ShareMax: _store_part,
    Q.TakeMax: _merge,
    Q.ShareColumns: _store_part,
    Q.StoreColumns: _merge,
}
