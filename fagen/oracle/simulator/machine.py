"""The parts of the GPU that a program can see: global memory, shared-memory slots, mbarriers, named barriers.

Whatever a program may not read at a moment is NaN at that moment; so a missing wait shows in the result by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ...errors import LaunchError
from ...plan.steps import MBar, NBar, Smem
from ..numeric import F32, Array


class SimulatedFault(LaunchError):
    """The program did what hardware punishes or leaves undefined: an access out of bounds, one arrival too many, …"""


class SimulatedDeadlock(LaunchError):
    """No role can go on. The message names every role that stands, its step, barrier and phase."""


# global memory ------------------------------------------------------------------------------------------------------------


@dataclass
class GlobalMemory:
    """Tensors by name. Inputs are float32 copies (batch, heads, seq, dim), outputs (batch, heads, seq[, dim]) in their own type,
    NaN until written; `written` (batch, heads, seq) marks the rows of each output that were. Counters are arrays of int."""

    inputs: dict[str, Array]
    outputs: dict[str, Array]
    counters: dict[str, npt.NDArray[np.int64]]
    descales: dict[str, F32] = field(default_factory=dict)
    """Of those given: one number, (batch, KV heads), or (batch, heads, blocks)."""
    spaces: dict[str, Array] = field(default_factory=dict)
    """Float workspaces (batch, heads, rows, cols) in float32, NaN until written."""
    dtypes: dict[str, str] = field(default_factory=dict)
    """Of the workspaces."""
    written: dict[str, npt.NDArray[np.bool_]] = field(default_factory=dict)
    exact_sums: bool = False
    """Whether the tensor core's e4m3 sums are cut term by term (see `numeric.tensor_core`)."""

    def __post_init__(self) -> None:
        self.written = {name: np.zeros(x.shape[:3], bool) for name, x in self.outputs.items()}

    def tile(self, name: str, batch: int, head: int, first: int, rows: int, limit: int | None = None) -> Array:
        """Rows first … first + rows − 1 of one head, of an input or of a workspace with its rows. Rows outside the tensor (TMA) or at or past `limit` (cp.async) are 0."""
        x = self.inputs[name] if name in self.inputs else self.spaces[name]
        checked = limit is not None
        end = min(first + rows, x.shape[2] if limit is None else limit)
        inside = 0 <= batch < x.shape[0] and 0 <= head < x.shape[1]
        if checked and first < end and not (inside and first >= 0 and end <= x.shape[2]):
            raise SimulatedFault(f"reads rows {first} … {end - 1} of head {head}, batch {batch} outside {name} {x.shape}")
        begin = max(first, 0)
        if inside and begin == first and end == first + rows:
            view: Array = x[batch, head, first:end]
            return view
        out = np.zeros((rows, x.shape[3]), np.float32)
        if inside and begin < end:
            out[begin - first : end - first] = x[batch, head, begin:end]
        return out

    def descale(self, name: str, *place: int) -> float:
        """Of one batch, head and block, as far as the array tells them apart; 1 where none was given. An earlier kernel may have left it in a
        workspace."""
        if name in self.spaces:
            return self._left(name, *place)
        given = self.descales.get(name)
        if given is None:
            return 1.0
        if given.ndim == 0 or not place:  # one number for all places
            return float(given.item())
        if len(place) != given.ndim or not all(0 <= i < n for i, n in zip(place, given.shape)):
            raise SimulatedFault(f"reads {name}{list(place)} of an array {given.shape}")
        return float(given[place])

    def _left(self, name: str, *place: int) -> float:
        """A descale that an earlier kernel left: of a tensor, of a batch and head, or of a block in it."""
        batch, head, block = (*place, 0, 0, 0)[:3]
        if not self.spaces[name].size:
            return 1.0  # of no keys: the launch passes no address, which stands for 1
        return float(self.workspace(name, batch, head, block, 1, 0, 1)[0, 0])

    def workspace(self, name: str, batch: int, head: int, first: int, rows: int, col: int, cols: int) -> Array:
        """A view of some rows and columns of a workspace's head."""
        x = self.spaces[name]
        inside = 0 <= batch < x.shape[0] and 0 <= head < x.shape[1] and min(first, rows, col, cols) >= 0
        if not (inside and first + rows <= x.shape[2] and col + cols <= x.shape[3]):
            place = f"rows {first} … {first + rows - 1}, columns {col} … {col + cols - 1} of head {head}, batch {batch}"
            raise SimulatedFault(f"{place} lie outside the workspace {name} {x.shape}")
        view: Array = x[batch, head, first : first + rows, col : col + cols]
        return view

    def store(self, name: str, batch: int, head: int, first: int, limit: int, rows: Array, col: int | None = None) -> None:
        """Write rows first, first + 1, … that lie below `limit`, or of them the columns from `col` on."""
        if name in self.spaces:
            kept = max(min(len(rows), limit - first), 0)
            self.workspace(name, batch, head, first, kept, 0, 1)[:, 0] = rows[:kept]
            return
        x = self.outputs[name]
        end = min(first + len(rows), limit)
        if end <= first:
            return
        if not (0 <= batch < x.shape[0] and 0 <= head < x.shape[1] and first >= 0 and end <= x.shape[2]):
            raise SimulatedFault(f"writes rows {first} … {end - 1} of head {head}, batch {batch} outside {name} {x.shape}")
        if col is None:
            x[batch, head, first:end] = rows[: end - first]
        else:
            x[batch, head, first:end, col : col + rows.shape[1]] = rows[: end - first]
        self.written[name][batch, head, first:end] = True


# shared memory ------------------------------------------------------------------------------------------------------------


class SharedSlot:
    """One tile in shared memory. `version` counts its changes: an asynchronous reader compares it. `unfenced`: who has written
    by ordinary stores or cp.async and not passed a ProxyFence since; WGMMA may not see such data."""

    def __init__(self, smem: Smem):
        # Tile numbers need more than float32's 24 bits.
        self.data: Array = np.full((smem.rows, smem.cols), np.nan, np.float64 if smem.dtype == "i32" else np.float32)
        self.bytes = smem.tile_bytes
        self.dtype = smem.dtype
        self.version = 0
        self.unfenced: set[str] = set()

    def write(self, values: Array | float, where: npt.NDArray[np.bool_] | None = None, *, generic: str = "") -> None:
        """Store `values` (in the elements `where`); `generic` names a writer whose stores WGMMA sees only after its fence."""
        np.copyto(self.data, values, where=True if where is None else where)
        self.version += 1
        if generic:
            self.unfenced.add(generic)

    def poison(self) -> None:
        """What the slot holds is no longer to be read."""
        self.write(np.nan)
        self.unfenced.clear()


@dataclass
class Transfer:
    """A TMA load under way: lands in `slot`, then completes `slot.bytes` of `full`."""

    slot: SharedSlot
    values: Array
    full: MBarrier
    step: str
    cta: int

    def land(self) -> None:
        self.slot.write(self.values)
        self.full.complete_bytes(self.slot.bytes, self.step)


# barriers -----------------------------------------------------------------------------------------------------------------


class MBarrier:
    """One mbarrier: pending arrivals and bytes of the current phase; both at zero complete it and start the next (PTX ISA 9.7.13.15).

    `frees`: slots that nobody may read after a completed phase, until they are filled again (this is an "empty" barrier).
    """

    def __init__(self, bar: MBar, index: int):
        self.name = f"{bar.name}[{index}]"
        self.arrivals = bar.arrivals
        self.pending = bar.arrivals
        self.bytes = 0
        self.phase = 0
        self.frees: list[SharedSlot] = []

    def passed(self, parity: int) -> bool:
        """Whether a wait for `parity` returns: the current phase has the other one."""
        return self.phase % 2 != parity

    def arrive(self, count: int, step: str, expect_bytes: int = 0) -> None:
        if count > self.pending:
            raise SimulatedFault(f"{step}: {count} arrivals at {self.name}, whose phase {self.phase} awaits {self.pending}")
        self.pending -= count
        self.bytes += expect_bytes
        self._maybe_complete()

    def complete_bytes(self, count: int, step: str) -> None:
        if count > self.bytes:
            raise SimulatedFault(f"{step}: {count} bytes complete {self.name}, whose phase {self.phase} awaits {self.bytes}")
        self.bytes -= count
        self._maybe_complete()

    def _maybe_complete(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.arrivals
            for slot in self.frees:
                slot.poison()


class NamedBarrier:
    """A hardware barrier: `threads` arrivals make a generation, whichever of them wait for it."""

    def __init__(self, name: str, threads: int):
        self.name = name
        self.threads = threads
        self.arrived = 0
        self.generation = 0

    def arrive(self, threads: int, step: str) -> int:
        """Arrive; returns the generation that this arrival belongs to."""
        mine = self.generation
        self.arrived += threads
        if self.arrived > self.threads:
            raise SimulatedFault(f"{step}: {self.arrived} threads at barrier {self.name}, which takes {self.threads}")
        if self.arrived == self.threads:
            self.arrived = 0
            self.generation += 1
        return mine


def named_barriers(bars: tuple[NBar, ...]) -> dict[tuple[str, int], NamedBarrier]:
    return {(b.name, i): NamedBarrier(f"{b.name}[{i}]", b.threads) for b in bars for i in range(b.count)}
