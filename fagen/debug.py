"""Debug builds (`plan(…, debug=True)`): kernels whose waits end, and say who waited for what.

What a debug build has beside the normal one
  bounded waits   A thread that waits on an mbarrier for longer than `WAIT_LIMIT_NS` writes the debug record (host-mapped, so that it
                  outlives the context) and traps; the launch fails instead of hanging, and `decode_record` says which role, barrier,
                  phase and tile it was. Long waits of a right kernel are far shorter: the longest is one tile's work.
  progress        Each role instance notes in shared memory the synchronisation step it comes to. The record holds all notes, so an
                  instance that is stuck where a wait cannot be bounded (bar.sync, setmaxnreg) is named by whoever waits for it.
  delays          After each synchronisation step 0 to `LONGEST_DELAY_NS`, drawn for each warp from the seed of the launch; none with
                  seed 0. A right kernel gives bitwise the same output under every seed.
All this costs registers, which the roles do not get: a debug build spills (`SPILL_BYTES`), so that it stays the same program with the
same instructions for products, copies and barriers.

A kernel without mbarriers (mma.sync with cp.async) has no wait that a clock could bound: its warps meet in __syncthreads() only, and
what they wait for there is each other. It gets the delays, and no record is ever written. Nor is one where every instance hangs in
bar.sync, or is through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

from .errors import InputError, InternalError
from .plan.expr import Expr
from .plan.kernel import KernelPlan, Plan
from .plan.steps import Arrive, CpWait, CtaSync, MmaWait, NArrive, Role, Step, Sync, Wait, walk

MAGIC = 0x0DEB0C
"""Word 0 of a record that was written; 0 before."""

WAIT_LIMIT_NS = 2_000_000_000
LONGEST_DELAY_NS = 1023  # one below a power of two

SPILL_BYTES = 512
"""What `compile.build` must allow a debug build (`allow_spill_bytes`): the largest tiles spill some 350 bytes a thread."""

SYNC_STEPS = (Wait, Arrive, Sync, NArrive, CtaSync, MmaWait, CpWait)
"""The steps at which an instance notes its progress, and after which it is delayed."""

NOT_STARTED = 0
"""A note of progress: no step reached yet; 1 + index of a step; 1 + the number of steps: the instance is through."""


@dataclass(frozen=True)
class Waiting:
    """Who waited in vain for what: words 1 to 10 of the record, in this order."""

    kernel: int
    """Index in `Plan.kernels`."""
    role: int
    """Index in `KernelPlan.roles`."""
    instance: int
    """The role's `w`."""
    step: int
    """Index of the Wait in `steps_of`."""
    slot: int
    """Of the ring of barriers."""
    phase: int
    """The parity waited for."""
    tile: int
    """The tile in hand (for batch_heads the query tile m), −1 before there is one."""
    key_block: int
    """The loop's j, −1 outside the loop over key blocks."""
    cta: int
    thread: int
    """In the CTA."""


FIELDS = tuple(f.name for f in fields(Waiting))
PROGRESS_WORD = 1 + len(FIELDS)
"""The first note of progress; one word for each role instance follows, roles in order."""


@dataclass(frozen=True)
class Record:
    """A debug record: word 0 is `MAGIC`, then `waiting`, then `progress` (see `NOT_STARTED`) of each role instance."""

    waiting: Waiting
    progress: tuple[int, ...]

    @property
    def words(self) -> tuple[int, ...]:
        """As 32-bit unsigned words."""
        return tuple(w & 0xFFFFFFFF for w in (MAGIC, *astuple(self.waiting), *self.progress))


def steps_of(kernel: KernelPlan) -> tuple[Step, ...]:
    """All steps, role by role in printed order: what a step index means."""
    return tuple(step for role in kernel.roles for step in walk(role.body))


def instances_of(kernel: KernelPlan) -> tuple[tuple[Role, int], ...]:
    """The role instances in the order of their notes."""
    return tuple((role, w) for role in kernel.roles for w in range(role.count))


def read_record(words: Sequence[int], plan: Plan) -> Record | None:
    """The record in 32-bit words (signed or unsigned), None if none was written. InputError: the words are not a record of this plan."""
    if len(words) == 0 or words[0] == 0:
        return None
    if words[0] != MAGIC:
        raise InputError("words", f"word 0 is {words[0]:#x}, in a debug record {MAGIC:#x}")
    signed = [(w & 0xFFFFFFFF) - ((w & 0x80000000) << 1) for w in words]
    if len(signed) < PROGRESS_WORD:
        raise InputError("words", f"{len(signed)} words, a debug record has at least {PROGRESS_WORD}")
    waiting = Waiting(*signed[1:PROGRESS_WORD])
    if not 0 <= waiting.kernel < len(plan.kernels):
        raise InputError("words", f"kernel {waiting.kernel} in the record, the plan has {len(plan.kernels)}")
    kernel = plan.kernels[waiting.kernel]
    steps, instances = steps_of(kernel), instances_of(kernel)
    progress = tuple(signed[PROGRESS_WORD : PROGRESS_WORD + len(instances)])
    fits = (
        0 <= waiting.role < len(kernel.roles)
        and 0 <= waiting.instance < kernel.roles[waiting.role].count
        and 0 <= waiting.step < len(steps)
        and isinstance(steps[waiting.step], Wait)
        and len(progress) == len(instances)
        and all(NOT_STARTED <= p <= 1 + len(steps) for p in progress)
    )
    if not fits:
        raise InputError(
            "words", f"the debug record is not one of kernel {kernel.name} of plan {plan.id}: {waiting}, progress {progress}"
        )
    return Record(waiting, progress)


def decode_record(words: Sequence[int], plan: Plan) -> str | None:
    """What hung, in a sentence; None if no wait ran out of time. `words`: `Kernel.debug_record()`. InputError as `read_record`."""
    record = read_record(words, plan)
    if record is None:
        return None
    at = record.waiting
    kernel = plan.kernels[at.kernel]
    steps, instances = steps_of(kernel), instances_of(kernel)
    wait = steps[at.step]
    if not isinstance(wait, Wait):
        raise InternalError(f"step {at.step} of {kernel.name} is {wait.id}, not a wait")
    role = kernel.roles[at.role]
    where = [f"{name} {value}" for name, value in (("tile", at.tile), ("key block", at.key_block)) if value >= 0]
    places = ", ".join((*where, f"CTA {at.cta}, thread {at.thread}"))
    others = [
        f"{_instance(r, w)} {_progress(note, steps, w)}"
        for (r, w), note in zip(instances, record.progress)
        if (r.name, w) != (role.name, at.instance)
    ]
    return (
        f"{_instance(role, at.instance)} waits at {wait.id} for {wait.bar}[slot {at.slot}], phase {at.phase} ({places})"
        f"{'; others: ' if others else ''}{', '.join(others)}"
    )


def _instance(role: Role, w: int) -> str:
    return f"{role.name} {w}" if role.count > 1 else role.name


def _progress(note: int, steps: Sequence[Step], w: int) -> str:
    if note == NOT_STARTED:
        return "not started"
    if note == 1 + len(steps):
        return "through"
    step = steps[note - 1]
    return f"at {step.id}{_barrier(step, w)}"


def _barrier(step: Step, w: int) -> str:
    if isinstance(step, (Sync, NArrive)):
        return f" ({step.bar}[{_value(step.index, w)}])"
    if isinstance(step, (Wait, Arrive)):
        return f" ({step.bar})"
    return ""


def _value(index: Expr, w: int) -> str:
    """A named barrier's index, where the instance decides it."""
    return str(index.eval({"w": w})) if index.symbols() <= {"w"} else str(index)
