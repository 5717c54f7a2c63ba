"""The nouns and steps of which every kernel is made. A role's program is data: these values, nested in loops.

One program, many readers: the emitter prints it, the simulator executes it, the proof walks it, `explain` shows it, the SASS
check counts it. So a step says *what happens* completely, and nothing about it hides in a template.

The rules that keep this honest
  (a) Synchronisation happens only in the steps of the section "synchronisation".
  (b) Asynchronous are Mma on the wgmma unit, TmaLoad and CpAsync; nothing else.
  (c) Registers of an in-flight Mma may not be touched until an MmaWait names them.
  (d) Row maximum, shuffles, exponentials and row sum stay together in one OnlineSoftmax.

Symbols that an Expr in a step may use: the kernel's parameters (`sq`, `sk`, `hq`, …), `cta` (blockIdx.x), `n_ctas` (gridDim.x),
`w` (index of the role's instance), variables bound by `Let` and `Loop`, and `row` where a step says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from .expr import Expr, IntLike

# ---------------------------------------------------------------------------------------------------------------- nouns


@dataclass(frozen=True)
class Gmem:
    """A tensor in global memory. Logical dims are (batch, seq, heads, head_dim), or (batch, heads, seq) for lse."""

    name: str
    dtype: str  # "bf16" | "fp16" | "e4m3" | "int8" | "fp32" | "i32"
    dims: tuple[str, ...]
    use: Literal["in", "out", "workspace"]


@dataclass(frozen=True)
class Smem:
    """A ring of `stages` tiles of rows × cols in shared memory. `offset` and `slot_bytes` are set by the memory map.

    `swizzle` "128B", "64B": the tile is kept as chunks of so many bytes a row, see `layout.swizzle`; the last chunk may be partly
    unused. "none": row-major.
    """

    name: str
    rows: int
    cols: int
    dtype: str
    stages: int
    swizzle: Literal["128B", "64B", "none"] = "128B"
    offset: int = -1

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a row that lie together."""
        return {"128B": 128, "64B": 64}.get(self.swizzle, self.cols * DTYPE_BYTES[self.dtype])

    @property
    def chunks(self) -> int:
        return -(-self.cols * DTYPE_BYTES[self.dtype] // self.chunk_bytes)

    @property
    def tile_bytes(self) -> int:
        return self.rows * self.chunks * self.chunk_bytes


FEW_COPIES, MANY_COPIES = 4, 8
"""16-byte loads that a thread may have in flight in a copy through registers, four registers each: beside a block's tiles, and where
registers are free."""

LANE_COLUMNS = 16
"""Neighbouring columns of a row that one lane holds where a warp streams rows: 32 bytes of 16-bit values, 16 bytes of 8-bit ones."""
ONE_ROW = {"uniform": 1, "lane": 1, "columns": LANE_COLUMNS, "masks": LANE_COLUMNS // 2}
"""Layouts of one row → registers a thread; "uniform": one value, the same in all lanes."""

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "e4m3": 1, "int8": 1, "fp32": 4, "i32": 4}


@dataclass(frozen=True)
class Frag:
    """A register tile of one role instance: of one warp ("…16" layouts, `rows` a multiple of 16) or one warpgroup ("…64", 64 rows).

    Of a warp that streams rows (quantise_steps.py): "lanes": each row lies in cols / 16 lanes; "columns": the 16 values that belong to a
    lane's columns; "masks": 16 bits for each of them; "lane": one value of each lane's own.

    In C an array per block of 16 (or 64) rows: `float S[64]`, or `float S[2][32]` with two blocks. Never indexed by a run-time value.
    """

    name: str
    rows: int
    cols: int
    dtype: str
    layout: str

    @property
    def unit_rows(self) -> int:
        if self.layout in ONE_ROW:
            return 1
        if self.layout == "lanes":
            return 32 * LANE_COLUMNS // self.cols
        return 64 if "64" in self.layout else 16

    @property
    def blocks(self) -> int:
        return self.rows // self.unit_rows

    @property
    def registers(self) -> int:
        """32-bit registers a thread holds for it."""
        if self.layout in ONE_ROW:
            return ONE_ROW[self.layout]
        if self.layout.startswith("row"):
            return 2 * self.blocks
        per_thread = self.rows * self.cols // (128 if self.unit_rows == 64 else 32)
        return per_thread * DTYPE_BYTES[self.dtype] // 4


@dataclass(frozen=True)
class MBar:
    """An mbarrier for each of `stages` slots. `arrivals` and `tx_bytes` of a phase are derived from the steps, never typed in."""

    name: str
    stages: int
    arrivals: int = -1
    tx_bytes: int = 0
    offset: int = -1


@dataclass(frozen=True)
class NBar:
    """`count` named (hardware) barriers with ids first_id … first_id + count − 1; `threads` take part in each (arrive + sync)."""

    name: str
    first_id: int
    count: int
    threads: int


@dataclass(frozen=True)
class Cursor:
    """Where a role stands in a ring: slot and phase parity. Starts at slot 0; a role that waits for *empty* slots starts with
    phase 1, so that its first pass over the ring finds every slot free. Carried across tiles."""

    name: str
    stages: int
    start_phase: int


@dataclass(frozen=True)
class Slot:
    """A tile in shared memory as an operand: the slot of `smem` at `cursor` (None: the ring has one slot and no cursor).

    `holds` says which rows of the source tensor must be in it, as the index of their first row: the contract that the proof
    checks against the load that filled it. `row` offsets into the tile (the 64 rows of a warpgroup, the keys of a warp), `col` does
    in columns: a whole number of 128-byte chunks. `head`, `batch`: whose rows they are, where the reader's own variables do not say it
    in the load's terms (a tile whose successor is already decoded).
    """

    smem: str
    cursor: str | None
    holds: Expr | None = None
    row: Expr | None = None
    head: Expr | None = None
    batch: Expr | None = None
    col: int = 0


# ---------------------------------------------------------------------------------------------------------------- steps


@dataclass(frozen=True, kw_only=True)
class Step:
    """`id` is the path of names ("consumer.steady.qk"), set once by `number()`; `why` becomes the comment beside the line."""

    name: str = ""
    why: str = ""
    id: str = ""

    @property
    def kind(self) -> str:
        return type(self).__name__


Body = tuple[Step, ...]

# control ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Let(Step):
    """const int var = value;"""

    var: str
    value: Expr


@dataclass(frozen=True, kw_only=True)
class Var(Step):
    """int var = value; — a variable that `Set` or `ClaimTile` changes later."""

    var: str
    value: Expr


@dataclass(frozen=True, kw_only=True)
class Set(Step):
    """var = value;"""

    var: str
    value: Expr


@dataclass(frozen=True, kw_only=True)
class Loop(Step):
    """for var = first, first + step, … up to and including `last` (down to, if step < 0). Not unrolled.

    `step` is an int, or an Expr that is positive. `segment` names the part ("masked", "steady") in ids and comments.
    """

    var: str
    first: Expr
    last: Expr
    step: IntLike
    body: Body
    segment: str = ""


@dataclass(frozen=True, kw_only=True)
class Forever(Step):
    """Repeat until a `Break` inside fires (persistent tiles claimed at run time)."""

    body: Body


@dataclass(frozen=True, kw_only=True)
class Break(Step):
    """Leave the innermost Forever if `cond`. Uniform over the CTA."""

    cond: Expr


@dataclass(frozen=True, kw_only=True)
class If(Step):
    """Uniform over the role instance."""

    cond: Expr
    then: Body
    orelse: Body = ()


@dataclass(frozen=True, kw_only=True)
class Elected(Step):
    """`body` runs in one thread: thread 0 of instance 0 of the role (uniform roles, which have no producer)."""

    body: Body


@dataclass(frozen=True, kw_only=True)
class Vote(Step):
    """`then` in the warps of which a lane's `unless` (the outcome of a StaleSoftmax) is false, else `orelse`.

    Both hold register steps and MmaWait only, with the same waits on both sides, so that threads part over data alone. Such a
    branch is also what ptxas moves no code across: the exponentials before it stay before the wait inside it."""

    unless: str
    then: Body
    orelse: Body


# copies -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TmaLoad(Step):
    """Asynchronous. One thread asks TMA for the tile of `src` whose first row is `seq`, of head `head` and batch `batch`; its bytes
    complete `full`. Announces the bytes to the barrier (one arrival with expect_tx) just before. Rows past the tensor read as 0.

    `transposed`: the tensor is (batch, heads, head_dim, seq), and the tile holds all its rows and the columns from `seq` on: one request
    for each chunk. `keeps_hint`: the cache policy of the hint stays in two registers from load to load; else it is made where it is used."""

    src: str
    dst: Slot
    full: str
    seq: Expr
    head: Expr
    batch: Expr
    hint: Literal["evict_first", "evict_last"]
    transposed: bool = False
    keeps_hint: bool = True


@dataclass(frozen=True, kw_only=True)
class CpAsync(Step):
    """Asynchronous (cp.async, 16 bytes each), by all threads of the role together: rows seq … of `src` into `dst`; rows at or past
    `limit` are filled with 0. Belongs to the group that the next CpCommit closes."""

    src: str
    dst: Slot
    seq: Expr
    limit: Expr
    head: Expr
    batch: Expr


@dataclass(frozen=True, kw_only=True)
class Copy(Step):
    """Synchronous (global → registers → shared, 16 bytes at a time), by all threads of the role together: rows seq … of `src`, from
    column `col` on, into `dst`; rows at or past `limit` are filled with 0. Visible to the other threads after a CtaSync. A thread has up
    to `most` loads in flight."""

    src: str
    dst: Slot
    seq: Expr
    limit: Expr
    head: Expr
    batch: Expr
    col: Expr | None = None
    most: int = FEW_COPIES


@dataclass(frozen=True, kw_only=True)
class CpCommit(Step):
    """Close the group of cp.async issued since the last one (possibly empty: group counts stay static)."""


@dataclass(frozen=True, kw_only=True)
class CpWait(Step):
    """Wait until at most `pending` of this thread's youngest groups are open. Makes them visible to this thread only."""

    pending: int


@dataclass(frozen=True, kw_only=True)
class LoadFrag(Step):
    """Shared memory → registers by ldmatrix: the warp's own rows of `src` as the A operand `dst`."""

    dst: str
    src: Slot


@dataclass(frozen=True, kw_only=True)
class StoreOut(Step):
    """Registers → global: rows first_row + row of `src` (fp32) as `dst`'s dtype, 16-byte stores; rows at or past `limit` are not
    written. `first_row` is that of the instance."""

    src: str
    dst: str
    first_row: Expr
    limit: Expr
    head: Expr
    batch: Expr
    col: Expr | None = None
    """First column; None: 0. A slice narrower than 32 columns is stored 4 bytes at a time."""


@dataclass(frozen=True, kw_only=True)
class StoreScores(Step):
    """Registers → a float32 workspace (batch, heads, seq, keys), row by row, 16-byte stores: rows first_row … of `src`, from column
    `col` on; rows at or past `limit` are not written."""

    src: str
    dst: str
    first_row: Expr
    limit: Expr
    head: Expr
    batch: Expr
    col: Expr


@dataclass(frozen=True, kw_only=True)
class StoreAcc(Step):
    """Accumulators → a float32 workspace (batch, heads, rows, columns), in 16-byte stores: `src` is rows first_row …, columns col … of
    the tile that starts at row `tile`. The workspace keeps a tile as its accumulators lie in registers, so that every thread reads
    back (`LoadAcc`) exactly what it wrote itself, and a warp's accesses are contiguous."""

    src: str
    dst: str
    tile: Expr
    first_row: Expr
    col: Expr
    head: Expr
    batch: Expr


@dataclass(frozen=True, kw_only=True)
class LoadAcc(Step):
    """The inverse of `StoreAcc`."""

    dst: str
    src: str
    tile: Expr
    first_row: Expr
    col: Expr
    head: Expr
    batch: Expr


@dataclass(frozen=True, kw_only=True)
class LoadRow(Step):
    """A row vector of a float32 workspace (batch, heads, rows) → registers. `share`: the first of the four lanes that hold a row gets
    the value, the others 0: a row sum as OnlineSoftmax continues it, each thread its own part."""

    dst: str
    src: str
    first_row: Expr
    head: Expr
    batch: Expr
    share: bool = False


@dataclass(frozen=True, kw_only=True)
class StoreRow(Step):
    """A row vector (one fp32 a row) → global (batch, heads, seq); rows at or past `limit` are not written."""

    src: str
    dst: str
    first_row: Expr
    limit: Expr
    head: Expr
    batch: Expr


@dataclass(frozen=True, kw_only=True)
class TransposeV(Step):
    """dst = srcᵀ in shared memory, 8-bit values, by the role's warps together: instance w takes every count-th strip of 16 columns.

    Keys come out in the order `layout.KEY_ORDER` within each 16, which is the order of P's registers (layout a64_e4m3perm), so that
    neither needs a data exchange. Reads and writes are ordinary (ldmatrix, stmatrix), `at_once` units of 32 keys read before they are
    written."""

    dst: Slot
    src: Slot
    at_once: int


@dataclass(frozen=True, kw_only=True)
class LoadScale(Step):
    """float `var` = `constant` · the scalar `times` · the descales `factors`: those of a (batch, head), of a block in it, or (all None)
    of the whole tensor.

    Descales are float32 arrays, or one number each. `declare`: the C type; "" sets a variable that there is. `least`: at least that,
    unless it is NaN."""

    var: str
    constant: float
    factors: tuple[str, ...]
    times: str | None = None
    head: Expr | None = None
    batch: Expr | None = None
    block: Expr | None = None
    least: float | None = None
    declare: str = "const float"


@dataclass(frozen=True, kw_only=True)
class ScaleShift(Step):
    """float `shift` = log2 of the scalar `scale`, at least `least`; float `weight` = 2^−shift. How a factor becomes part of an
    exponential's exponent, and how its row sums get rid of it."""

    shift: str
    weight: str
    scale: str
    least: float


# persistent tiles claimed at run time ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ClaimTile(Step):
    """var = n_ctas + atomicAdd(counter, 1): the next unclaimed tile. One thread."""

    var: str
    counter: str


@dataclass(frozen=True, kw_only=True)
class PutTile(Step):
    """Write the tile number `value` to the slot of the tile ring. One thread; an ordinary shared-memory store."""

    dst: Slot
    value: Expr


@dataclass(frozen=True, kw_only=True)
class GetTile(Step):
    """int var = the tile number in the slot; the same in all threads of the role (and known to the compiler to be)."""

    var: str
    src: Slot


@dataclass(frozen=True, kw_only=True)
class ResetCounter(Step):
    """The last CTA to come here sets the counter back to 0 for the next launch (counter[1] counts the CTAs). One thread."""

    counter: str


# what stands in for a step that a removal took away (see removal.py) -----------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Prefill(Step):
    """Every slot of `smem` holds ordinary numbers from here on (0.5 to 1 in size, random in sign and fraction, so that products of
    them cost what they cost on real data): an ordinary store by all threads of the role. Stands for all loads of the ring."""

    smem: str


@dataclass(frozen=True, kw_only=True)
class Opaque(Step):
    """Nothing, but the compiler has to reckon with the registers of `reads` being read here and those of `changes` being changed, so that
    what makes the one and what uses the other stays. Stands for a product."""

    reads: tuple[str, ...]
    changes: tuple[str, ...]


# synchronisation --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Wait(Step):
    """Until the phase of `bar`[cursor.slot] with the parity cursor.phase has completed (mbarrier.try_wait.parity).

    `refill`: the phase before that one. A cursor that counts the fillings of one ring then tells when the slot beside it, in a ring
    that moves in step, is free."""

    bar: str
    cursor: str
    refill: bool = False


@dataclass(frozen=True, kw_only=True)
class Arrive(Step):
    """One arrival at `bar`[cursor.slot] by each warp of the instance (`who` "warp": its lane 0) or by the one running thread. The machine
    lets it overtake loads whose values nothing has used yet; `behind`: not the load of this variable, a number from 0 on."""

    bar: str
    cursor: str
    who: Literal["warp", "thread"] = "warp"
    behind: str | None = None


@dataclass(frozen=True, kw_only=True)
class Advance(Step):
    """cursor: next slot; the phase flips when the ring wraps."""

    cursor: str


@dataclass(frozen=True, kw_only=True)
class Sync(Step):
    """bar.sync on named barrier first_id + index: arrive and wait for the others."""

    bar: str
    index: Expr


@dataclass(frozen=True, kw_only=True)
class NArrive(Step):
    """bar.arrive on named barrier first_id + index: arrive, do not wait."""

    bar: str
    index: Expr


@dataclass(frozen=True, kw_only=True)
class CtaSync(Step):
    """__syncthreads(): every thread of the CTA. Only where all roles run it equally often."""


@dataclass(frozen=True, kw_only=True)
class ProxyFence(Step):
    """fence.proxy.async.shared::cta by every thread of the warp, then __syncwarp: the warp's ordinary shared-memory writes become visible
    to TMA and WGMMA, and one lane may announce them."""


# matrix -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Mma(Step):
    """d (+)= a · b over the whole tile.

    unit "wgmma": fence, all k-steps, commit; asynchronous, one group (PTX ISA 9.7.15). `a` is a Frag's name or a Slot.
    unit "mma_sync": the product with its ldmatrix loads; synchronous.
    Products of int8 are summed in integers: `d` is a Frag of i32.
    `trans_b` False: b is [n][k] (K in Q·Kᵀ); True: b is [k][n] (V in P·V).
    """

    d: str
    a: str | Slot
    b: Slot
    accumulate: bool
    trans_b: bool
    unit: Literal["wgmma", "mma_sync"]


@dataclass(frozen=True, kw_only=True)
class MmaWait(Step):
    """wgmma.wait_group: until at most `pending` groups are open. `ready` names exactly the Frags (accumulators, register operands)
    of the groups that this completes: the one place where an in-flight register becomes usable again."""

    pending: int
    ready: tuple[str, ...]


# registers --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Fill(Step):
    """Every element of `dst` = value (0, 1 or -inf)."""

    dst: str
    value: float


@dataclass(frozen=True, kw_only=True)
class Limits(Step):
    """For every row of the instance, the last key it sees: dst[r] = limit, an Expr that may use `row` (index in the tensor, = first_row + r)."""

    dst: str
    first_row: Expr
    limit: Expr


@dataclass(frozen=True, kw_only=True)
class Mask(Step):
    """s[r, c] = −inf where key first_key + c is past limits[r]."""

    s: str
    limits: str
    first_key: Expr


@dataclass(frozen=True, kw_only=True)
class IntToFloat(Step):
    """dst = src as float32, exactly: integers below 2^24 in size (the rules see to it). Whoever wants the scores reads dst; src is used up,
    and the next product may write it."""

    dst: str
    src: str


@dataclass(frozen=True, kw_only=True)
class OnlineSoftmax(Step):
    """One block of the online softmax (FlashAttention-2, algorithm 1), in units of log2 with `scale_log2` = softmax scale · log2 e:
    m' = max(m, rowmax(s)·scale_log2); alpha = 2^(m − m'); s = 2^(s·scale_log2 − m'); l = l·alpha + the thread's own part of rowsum(s); m = m'.
    A row that has seen no key yet keeps m = −inf, alpha = 0, s = 0. `first`: nothing came before, so alpha is not needed (l = rowsum).
    `scale`: the scalar of a LoadScale instead of the constant. `offset`: exponentials and l are 2^offset times larger, so that P
    fills the range of e4m3. `shift` and `weight` (of a ScaleShift): s·scale_log2 + shift is what m is the maximum of and s becomes the
    exponential of; row sums are multiplied by the weight, so l does not have the shift.

    `lift`: m becomes up to so many powers of two more than the maximum, so that a StaleSoftmax bears as much larger scores in later
    blocks: as many as there are in the sum of the row's exponentials over its largest, so none in a row that one key has for itself.
    With `first`, of this block: k = min(⌊log2 of the sum of s⌋ − offset, lift), then m + k, s·2^−k, l·2^−k. Else, of the blocks before:
    m' = max(m, top, min(m + ⌊log2 of the whole row sum l⌋ − offset, top + lift)) with top = rowmax(s)·scale_log2; not beside `shift`,
    which l does not have. out and lse are those of any reference."""

    s: str
    m: str
    l: str
    alpha: str
    scale_log2: float
    first: bool
    scale: str | None = None
    offset: int = 0
    lift: int = 0
    shift: str | None = None
    weight: str | None = None


@dataclass(frozen=True, kw_only=True)
class StaleSoftmax(Step):
    """Exponentials against the reference of earlier blocks, which need not be the row's maximum so far, only not far below it:
    e = 2^(s·scale − m + offset) rounded to e's dtype, in P's layout; part = the thread's own part of their row sums; s stays.

    `fits` is true in threads whose values are all in range: the sum (of positive numbers) is below `limit`, or for e4m3 no byte
    is saturated. NaN and infinities do not fit, so a row without a reference goes to the exact step by itself. Where `calm` is
    false (see Calm) nothing is computed, and nothing fits. `shift`, `weight`: as in OnlineSoftmax."""

    calm: str
    e: str
    s: str
    m: str
    part: str
    fits: str
    scale_log2: float
    scale: str | None = None
    offset: int = 0
    shift: str | None = None
    weight: str | None = None


@dataclass(frozen=True, kw_only=True)
class Calm(Step):
    """Whether a warp's references are worth trying: `var` = in the exact step that left `alpha`, no row's reference grew by more than a
    stale one bears (alpha ≥ `least`). Without `alpha` it is declared, or set anew, at the start of a tile: as true, or with `limits` where
    every row of the warp sees `seen` keys of the first block, which starts at `first_key`: fewer say too little of the next block's.
    Where block after block needs the exact step, one softmax is computed instead of two."""

    var: str
    alpha: str | None = None
    least: float = 1.0
    declare: bool = False
    limits: str | None = None
    first_key: Expr | None = None
    seen: int = 0


@dataclass(frozen=True, kw_only=True)
class AddSums(Step):
    """l += part."""

    l: str
    part: str


@dataclass(frozen=True, kw_only=True)
class Hold(Step):
    """What stands before it stays before it, in the machine code too: a branch over a row sum being negative, which it never is.
    ptxas moves waits and arithmetic past everything but the end of a basic block."""

    row: str


@dataclass(frozen=True, kw_only=True)
class CopyRow(Step):
    """dst = src, a value for each row."""

    dst: str
    src: str


@dataclass(frozen=True, kw_only=True)
class Move(Step):
    """dst = src, register by register, not before this place: dst was the operand of a product until now."""

    dst: str
    src: str


@dataclass(frozen=True, kw_only=True)
class Pack(Step):
    """p = s rounded to p's dtype (e4m3: saturating), in p's layout: a16, a64 of 16-bit types and a64_e4m3perm move no data between
    threads; a64 of e4m3 exchanges within each quad."""

    p: str
    s: str


@dataclass(frozen=True, kw_only=True)
class Rescale(Step):
    """o[r, :] *= alpha[r]."""

    o: str
    alpha: str


@dataclass(frozen=True, kw_only=True)
class Promote(Step):
    """total += o, in float32: the tensor core adds up e4m3 products with about 13 bits, so a long sum is kept outside of it."""

    total: str
    o: str


# rows kept whole, and their pieces ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SumRow(Step):
    """dst[r] = src[r] summed over the four lanes that hold row r: from each thread's own part to the row's sum, in all of them."""

    dst: str
    src: str


@dataclass(frozen=True, kw_only=True)
class MulRow(Step):
    """dst[r] *= src[r]."""

    dst: str
    src: str


@dataclass(frozen=True, kw_only=True)
class Reciprocal(Step):
    """dst[r] = scale / src[r] (0 where src is 0). `scale`: the scalar of a LoadScale; None: 1."""

    dst: str
    src: str
    scale: str | None = None


@dataclass(frozen=True, kw_only=True)
class LogSumExp(Step):
    """lse[r] = (m − offset)·ln 2 + ln l (−inf where l is 0), of a whole row sum l. `offset`: as in OnlineSoftmax, undone here."""

    lse: str
    m: str
    l: str
    offset: int = 0


@dataclass(frozen=True, kw_only=True)
class RowPass(Step):
    """One pass of a warp over row `row` of the float32 workspace `src`, its first `cols` columns (a multiple of 64), 16-byte accesses.

    With x = s · scale_log2: "max": m = max x. "sum": l = Σ 2^(x − m). "max_sum": both at once, each lane correcting its sum when
    its maximum moves. "exponentials": dst[c] = 2^(x − m), rounded to `dst`'s dtype. A row without keys has m = −inf, l = 0.
    m and l are the same in all lanes after a pass."""

    op: Literal["max", "sum", "max_sum", "exponentials"]
    src: str
    m: str
    l: str
    row: Expr
    cols: Expr
    head: Expr
    batch: Expr
    scale_log2: float
    dst: str = ""


# merging what the warps of a split_kv tile have, through shared memory ---------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StoreStats(Step):
    """m and l (whole row sums) of this instance → its row of `dst`: m of all rows, then l of all rows. An ordinary store."""

    m: str
    l: str
    dst: Slot


@dataclass(frozen=True, kw_only=True)
class MergeStats(Step):
    """Fold the statistics that all instances stored in `src` (m_w, l_w) into the running m and l:
    m' = max(m, max m_w); alpha = 2^(m − m'); l = l·alpha + Σ l_w·2^(m_w − m'); beta = 2^(part − m'), where `part` is the instance's
    own m_w; m = m'. Factors of a row without keys are 0."""

    m: str
    l: str
    alpha: str
    part: str
    beta: str
    src: Slot


@dataclass(frozen=True, kw_only=True)
class StoreFrag(Step):
    """Accumulators of this instance → its part of `dst` (columns from dst.col on), as they lie in registers, 16 bytes at a time. An
    ordinary store."""

    src: str
    dst: Slot


@dataclass(frozen=True, kw_only=True)
class AddParts(Step):
    """dst += the instance's columns of all instances' parts in `src`: instance w owns columns w·cols … of the tile."""

    dst: str
    src: Slot


# ---------------------------------------------------------------------------------------------------------------- roles and kernels


@dataclass(frozen=True)
class Role:
    """`count` instances of `warps` warps each run `body`; the symbol `w` is the instance. Roles fill the CTA's warps in order.

    `elect`: the body runs in one thread (the first) of the instance, as a TMA producer does. `registers`: setmaxnreg, None: as launched.
    """

    name: str
    count: int
    warps: int
    elect: bool
    registers: int | None
    frags: tuple[Frag, ...]
    cursors: tuple[Cursor, ...]
    body: Body

    @property
    def threads(self) -> int:
        return self.count * self.warps * 32


def bodies(step: Step) -> tuple[tuple[str, Body], ...]:
    """The nested bodies of a step, with the name of the field that holds each."""
    if isinstance(step, (Loop, Forever, Elected)):
        return (("body", step.body),)
    if isinstance(step, (If, Vote)):
        return (("then", step.then), ("orelse", step.orelse))
    return ()


def rewritten(body: Body, rule: Callable[[Step], Body]) -> Body:
    """Each step replaced by what the rule makes of it, the innermost first; containers of which nothing is left are left out."""
    out: list[Step] = []
    for step in body:
        inner: dict[str, Any] = {field: rewritten(b, rule) for field, b in bodies(step)}
        if inner and not any(inner.values()):
            continue
        out += rule(replace(step, **inner))
    return tuple(out)


def walk(body: Body) -> Iterator[Step]:
    """Every step in printed order, containers before what they hold."""
    for step in body:
        yield step
        for _, inner in bodies(step):
            yield from walk(inner)


def without_unused(body: Body) -> Body:
    """The same body without variables that nothing reads: roles share the steps that decode a tile, but not all need all of it."""
    used = frozenset().union(*(_symbols(value) for step in walk(body) for value in step_fields(step).values()))
    slim = _keep(body, lambda step: not (isinstance(step, (Let, Var, Set)) and step.var not in used))
    return body if slim == body else without_unused(slim)  # what only an unused one read is now unused itself


def _keep(body: Body, wanted: Callable[[Step], bool]) -> Body:
    kept = (step for step in body if wanted(step))
    return tuple(replace(step, **{field: _keep(b, wanted) for field, b in bodies(step)}) for step in kept)  # type: ignore[arg-type]


def _symbols(value: object) -> frozenset[str]:
    if isinstance(value, Expr):
        return value.symbols()
    if isinstance(value, Slot):
        return frozenset().union(*(_symbols(e) for e in (value.holds, value.row)))
    return frozenset()


def number(body: Body, prefix: str) -> Body:
    """Give every step its stable id: the path of segment names, then its own name (or kind); repeats get .2, .3 …"""
    seen: dict[str, int] = {}
    out: list[Step] = []
    for step in body:
        own = step.name or _own_name(step)
        path = f"{prefix}.{own}"
        seen[path] = seen.get(path, 0) + 1
        if seen[path] > 1:
            path = f"{path}.{seen[path]}"
        inner = {}
        for field, b in bodies(step):
            inner[field] = number(b, path if field != "orelse" else f"{path}.else")
        out.append(replace(step, id=path, **inner))  # type: ignore[arg-type]
    return tuple(out)


def _own_name(step: Step) -> str:
    """Of an unnamed step: a loop's segment, else the kind and what it acts on (wait_k_full, advance_k, let_m)."""
    if isinstance(step, Loop) and step.segment:
        return step.segment
    on = next((getattr(step, f) for f in ("bar", "cursor", "var", "dst") if isinstance(getattr(step, f, None), str)), "")
    return f"{_snake(step.kind)}_{on}" if on else _snake(step.kind)


def _snake(kind: str) -> str:
    return "".join(("_" + c.lower()) if c.isupper() and i else c.lower() for i, c in enumerate(kind))


def step_fields(step: Step) -> dict[str, object]:
    """The step's own fields (without name, why, id and nested bodies), for printing."""
    nested = {f for f, _ in bodies(step)}
    return {f.name: getattr(step, f.name) for f in fields(step) if f.name not in {"name", "why", "id"} | nested}
