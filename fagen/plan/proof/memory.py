"""The steps that move data through shared memory and registers: what they write and read, and who can see it when."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .. import steps as S
from .registers import REGISTER_STEPS, Group, frag_uses
from .state import Fill, Line, Read, SlotKey, name
from .sync import arrive

if TYPE_CHECKING:
    from .run import Run


# copies ---------------------------------------------------------------------------------------------------------------


def slot_key(run: Run, line: Line, step: S.Step, slot: S.Slot) -> SlotKey:
    at = line.cursors[slot.cursor].slot if slot.cursor is not None else 0
    if at >= run.smem[slot.smem].stages:
        run.refuse("slot", line, step, f"uses slot {at} of {slot.smem}, which has {run.smem[slot.smem].stages}")
    return slot.smem, at


def alone(run: Run, line: Line, step: S.Step, alone: bool) -> None:
    if line.single != alone:
        should, does = ("one thread", "all threads") if alone else ("all threads", "one thread")
        run.refuse("who", line, step, f"is for {should} but {does} would run it")


def new_fill(run: Run, line: Line, step: S.TmaLoad | S.CpAsync | S.Copy, key: SlotKey, expected: int, asynchronous: bool) -> Fill:
    env = line.env
    identity = (run.evaluate(step.head, env), run.evaluate(step.batch, env))
    return Fill(step, asynchronous, run.evaluate(step.seq, env), step.head, step.batch, identity, expected)


def part(run: Run, line: Line, fill: Fill, issue: int, end: int) -> None:
    fill.issues.append(issue)
    fill.ends.append(end)
    fill.lines.append(line.index)


def _tma_load(run: Run, line: Line, step: S.TmaLoad) -> None:
    alone(run, line, step, True)
    key = slot_key(run, line, step, step.dst)
    issue = run.event(line, step)
    lands = run.order.add(line.label(step, "lands"), run.order.masks[issue])
    fill = new_fill(run, line, step, key, 1, asynchronous=True)
    part(run, line, fill, issue, lands)
    run.fills.setdefault(key, []).append(fill)
    bar = run.mbars[step.full, key[1]]  # exists: `checks.static` compared the rings' lengths
    bar.events.append(lands)
    bar.bytes += run.smem[step.dst.smem].tile_bytes
    arrive(run, line, step, bar, issue, 1)


def _cp_async(run: Run, line: Line, step: S.CpAsync) -> None:
    alone(run, line, step, False)
    key = slot_key(run, line, step, step.dst)
    issue = run.event(line, step)
    end = run.order.add(line.label(step, "lands"), run.order.masks[issue])
    line.copies.append(end)
    mine = new_fill(run, line, step, key, run.writers[line.role.name], asynchronous=False)
    shared_fill(run, line, step, key, mine, issue, end)


def _transpose_v(run: Run, line: Line, step: S.TransposeV) -> None:
    """Every warp reads the whole raw tile's columns that it owns and writes its strips of the turned one, by ordinary accesses."""
    alone(run, line, step, False)
    e = run.event(line, step)
    raw = read(run, line, step, step.src, e, e, asynchronous=False)
    mine = Fill(step, False, raw.seq, raw.head, raw.batch, raw.identity, run.writers[line.role.name])
    shared_fill(run, line, step, slot_key(run, line, step, step.dst), mine, e, e)


def shared_fill(run: Run, line: Line, step: S.Step, key: SlotKey, mine: Fill, issue: int, end: int) -> None:
    """A fill of which every line of the role writes a part: the n-th part of a line belongs to the slot's n-th fill."""
    turn = line.parts.get(key, 0)
    line.parts[key] = turn + 1
    fills = run.fills.setdefault(key, [])
    if turn == len(fills):
        fills.append(mine)
    fill = fills[turn]
    if fill.step is not step or (fill.seq, fill.identity) != (mine.seq, mine.identity):
        run.refuse("parts", line, step, f"copies other rows than the instance whose part {fill.step.id} is")
    part(run, line, fill, issue, end)


def _cp_commit(run: Run, line: Line, step: S.CpCommit) -> None:
    line.groups.append(line.copies)
    line.copies = []


def _cp_wait(run: Run, line: Line, step: S.CpWait) -> None:
    done = line.groups[: max(len(line.groups) - step.pending, 0)]
    line.groups = line.groups[len(done) :]
    for group in done:
        for end in group:
            line.own |= run.order.masks[end]
    line.own |= run.order.masks[run.order.add(line.label(step), line.known | line.own)]


def _load_frag(run: Run, line: Line, step: S.LoadFrag) -> None:
    """ldmatrix has read when the fragment is used: the machine waits for it there, and an arrival before that, which waits for nothing, may
    overtake it."""
    alone(run, line, step, False)
    start = run.event(line, step)
    line.loading[step.dst] = run.order.add(line.label(step, "arrives"), run.order.masks[start])
    read(run, line, step, step.src, start, line.loading[step.dst], asynchronous=False)
    touch(run, line, step)


def read(run: Run, line: Line, step: S.Step, slot: S.Slot, start: int, end: int, asynchronous: bool) -> Fill:
    """Find the fill this read sees (the youngest that happens before it) and hold it to the contract."""
    key = slot_key(run, line, step, slot)
    if slot.row is not None and not 0 <= run.evaluate(slot.row, line.env) < run.smem[slot.smem].rows:
        run.refuse("slot", line, step, f"reads past the {run.smem[slot.smem].rows} rows of {slot.smem}")
    fills, before = run.fills.get(key, []), run.order.masks[start]
    for fill in reversed(fills):
        if len(fill.ends) == fill.expected and not fill.ends_mask & ~before:
            break
    else:
        late = tuple(e for f in fills[-1:] for e in f.ends if not before >> e & 1)[:1]
        run.fail("race", f"{line.label(step)} reads {name(key)} before it is filled", run.order.witness(start, *late))
    _contract(run, line, step, slot, fill, start, key)
    if asynchronous and not fill.asynchronous:
        _fenced(run, line, step, fill, start, key)
    fill.reads.append(Read(start, end, step))
    return fill


def _contract(run: Run, line: Line, step: S.Step, slot: S.Slot, fill: Fill, start: int, key: SlotKey) -> None:
    if slot.holds is None or fill.head is None or fill.batch is None:
        return
    whose = (slot.head if slot.head is not None else fill.head, slot.batch if slot.batch is not None else fill.batch)
    want = tuple(run.evaluate(e, line.env) for e in (slot.holds, *whose))
    if want != (fill.seq, *fill.identity):
        text = "(row {}, head {}, batch {})"
        found = text.format(fill.seq, *fill.identity)
        run.fail(
            "stale",
            f"{line.label(step)} expects {text.format(*want)} in {name(key)} but finds {found} by {fill.step.id}",
            run.order.witness(start),
        )


def _fenced(run: Run, line: Line, step: S.Step, fill: Fill, start: int, key: SlotKey) -> None:
    """Ordinary writes reach the async proxy only past a fence of the writing thread."""
    masks = run.order.masks
    for writer, end in zip(fill.lines, fill.ends):
        if not any(masks[f] >> end & 1 and masks[start] >> f & 1 for f in run.lines[writer].fences):
            message = f"{line.label(step)} reads {name(key)} through the async proxy without a fence after {fill.step.id}"
            run.fail("proxy", message, run.order.witness(start))


# persistent tiles -------------------------------------------------------------------------------------------------------


def _claim_tile(run: Run, line: Line, step: S.ClaimTile) -> None:
    alone(run, line, step, True)
    line.env[step.var] = line.env["n_ctas"] + len(run.claims)
    run.claims.append(run.event(line, step))


def _put_tile(run: Run, line: Line, step: S.PutTile) -> None:
    alone(run, line, step, True)
    key, e = slot_key(run, line, step, step.dst), run.event(line, step)
    fill = Fill(step, False, run.evaluate(step.value, line.env), None, None, (0, 0))
    part(run, line, fill, e, e)
    run.fills.setdefault(key, []).append(fill)


def _get_tile(run: Run, line: Line, step: S.GetTile) -> None:
    start = run.event(line, step)
    line.loading[step.var] = run.order.add(line.label(step, "arrives"), run.order.masks[start])
    line.env[step.var] = read(run, line, step, step.src, start, line.loading[step.var], asynchronous=False).seq


def _reset_counter(run: Run, line: Line, step: S.ResetCounter) -> None:
    alone(run, line, step, True)
    run.resets.append(run.event(line, step))


# matrix and registers -----------------------------------------------------------------------------------------------------


def _mma(run: Run, line: Line, step: S.Mma) -> None:
    alone(run, line, step, False)
    touch(run, line, step)
    asynchronous = step.unit == "wgmma"
    start = end = run.event(line, step)
    if asynchronous:
        end = run.order.add(line.label(step, "completes"), run.order.masks[start])
        line.registers.flight.append(Group(step.d, step.a if isinstance(step.a, str) else None, end, step.id))
    for slot in (step.a, step.b):
        if isinstance(slot, S.Slot):
            read(run, line, step, slot, start, end, asynchronous)


def _mma_wait(run: Run, line: Line, step: S.MmaWait) -> None:
    done, wrong = line.registers.wait(step)
    if wrong:
        run.refuse("ready", line, step, wrong)
    for e in done:
        line.known |= run.order.masks[e]
    run.event(line, step)


def touch(run: Run, line: Line, step: S.Step) -> None:
    for frag in frag_uses(step)[0]:
        if frag in line.loading:
            line.known |= run.order.masks[line.loading.pop(frag)]
    wrong = line.registers.touch(step)
    if wrong:
        run.refuse("registers", line, step, wrong)


HANDLERS: dict[type[S.Step], Callable[[Run, Line, Any], None]] = {
    S.TmaLoad: _tma_load,
    S.CpAsync: _cp_async,
    S.TransposeV: _transpose_v,
    S.CpCommit: _cp_commit,
    S.CpWait: _cp_wait,
    S.LoadFrag: _load_frag,
    S.ClaimTile: _claim_tile,
    S.PutTile: _put_tile,
    S.GetTile: _get_tile,
    S.ResetCounter: _reset_counter,
    S.Mma: _mma,
    S.MmaWait: _mma_wait,
    **dict.fromkeys(REGISTER_STEPS, touch),
}
