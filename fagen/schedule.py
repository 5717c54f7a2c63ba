"""How it is computed: the `Schedule` value. Every field is a knob that changes the kernel, or is rejected by `plan()` with a code."""

from __future__ import annotations

from dataclasses import dataclass

from .value import Value


@dataclass(frozen=True, kw_only=True)
class Schedule(Value):
    """A point in the space of attention kernels. `plan(attention, schedule)` says whether it is legal, and why not."""

    arch: str
    """Target: "sm_80", "sm_90" (mma.sync kernels) or "sm_90a" (WGMMA, TMA, setmaxnreg)."""
    tile_q: int
    """Query rows of a CTA's tile. wgmma: 64 · consumers. mma_sync: a multiple of 16 · warps (split_q)."""
    tile_kv: int
    """Keys of a block."""
    loop_order: str = "q_outer"
    """"q_outer": a query tile stays, K/V blocks pass by (FlashAttention-2). "kv_outer": a K/V block stays, query tiles pass by and
    O, m, l go through a float32 workspace (FlashAttention-1)."""
    parallelism: str = "query_tiles"
    """What a CTA owns: "batch_heads": a (batch, head), looping over its query tiles; "query_tiles": one query tile;
    "persistent_static": one CTA an SM, tiles cta, cta + SMs, …; "persistent_dynamic": one CTA an SM, tiles claimed by an atomic
    counter, longest first within sections of heads that fit L2; "kv_splits": the keys are split as well."""
    partition: str = "split_q"
    """How warps divide a tile: "split_q": each owns rows of Q and sees all keys; "split_kv": each owns keys of the block, partial
    maximum, sum and O merged through shared memory."""
    roles: str = "uniform"
    """"uniform": all warps alike. "producer": a producer warpgroup issues the loads, `consumers` warpgroups compute."""
    warps: int | None = None
    """mma_sync: warps of the CTA, 1, 2, 4 or 8. wgmma: None."""
    consumers: int | None = None
    """wgmma: warpgroups that compute, 1 to 4. mma_sync: None."""
    registers: tuple[int, int] | None = None
    """With roles "producer": setmaxnreg of (producer, consumer). None: the table for that many consumers."""
    movement: str = "cp_async"
    """Global → shared memory: "ld_st" (through registers), "cp_async" or "tma"."""
    mma: str = "mma_sync"
    """Matrix unit: "mma_sync" (one warp, synchronous) or "wgmma" (a warpgroup, asynchronous, operands in shared memory)."""
    q_operand: str | None = None
    """wgmma: where Q is an operand of Q·Kᵀ from. None: shared memory. "registers": each warpgroup takes its rows into registers once a tile;
    the products then read K alone from shared memory, and Q's slot is free as soon as it was read. mma_sync: None, Q is in registers
    wherever it fits."""
    p_operand: str = "registers"
    """Where P is an operand of P·V from: "registers" or "shared" memory."""
    stages: int | tuple[int, int] = 1
    """Slots of the K ring and of the V ring: one number for both, or (K, V). A V that the kernel transposes comes from memory into a ring as
    long as K's."""
    stages_q: int | None = None
    """Slots for query tiles, 1 or 2. With 2 the next tile's Q is on its way before this tile's last product has read its own: persistent
    kernels with a producer. None: 1, or 2 with `fuse_tiles`, which takes no other value. With `q_operand` "registers" the slot is free at
    once, and 1 is all there is use for."""
    overlap: str = "none"
    """wgmma: "none"; "within": a warpgroup's softmax runs under its own P·V; "pingpong": under the other warpgroup's products,
    kept in turn by named barriers; "both"."""
    fuse_tiles: bool = False
    """Persistent kernels: a tile's last P·V is issued together with the next tile's first Q·Kᵀ, whose softmax and the epilogue then run
    under products. Takes a second Q slot (`stages_q`), unless Q is in registers (`q_operand`)."""
    skip_masked: bool = False
    """wgmma, causal: a warpgroup passes over the blocks that only the warpgroups below it see, for which the CTA loads them. Without it,
    every warpgroup of a tile computes all of the tile's blocks and masks."""
    softmax: str = "fused"
    """"fused": S never leaves the SM. "three_pass", "two_pass": S is written to memory and normalised by its own kernel."""
    normalise: str = "once"
    """"once": O is divided by the row sum at the end. "each_step": after every block."""
    reference: str = "running"
    """What exponentials are taken against: the "running" maximum, or a "stale" one with a check and an exact fallback."""
    precision: str | None = None
    """What the products are computed in. None: the attention's dtype. "e4m3", of 16-bit tensors: kernels of the same plan quantise q, k
    and v into workspaces, from which the attention kernel then reads. "int8": likewise, q and k to integers, v to e4m3. "int8_qk": q and k to
    integers, and v is read as it is."""
    scale_granularity: str | None = None
    """8-bit types: what one quantisation scale covers: a "tensor", a "head" (one KV head of one batch), or a "block" of `tile_q` query rows or
    `tile_kv` keys. 16-bit: None."""
    hadamard: bool = False
    """With `precision`: Q and K are rotated by a Hadamard matrix with random signs before they are rounded (incoherent processing), which
    spreads large columns; scores stay what they were."""
    smooth_k: bool = False
    """With `precision`: K's mean over the sequence is taken off before it is rounded. out is that of K itself; lse gets its part back."""
    v_transposed: bool = False
    """An e4m3 V is given as (batch, heads, head_dim_v, seqlen); otherwise the kernel transposes it."""
    promote_every: int | None = None
    """e4m3 P·V: add the tensor core's accumulator, which keeps about 13 bits, to a float32 copy every so many key blocks, and start it anew.
    None: never."""

    @property
    def slots_q(self) -> int:
        """`stages_q`, or what None stands for."""
        return self.stages_q or (2 if self.fuse_tiles and self.q_operand is None else 1)

    @property
    def stages_k(self) -> int:
        return self.stages if isinstance(self.stages, int) else self.stages[0]

    @property
    def stages_v(self) -> int:
        return self.stages if isinstance(self.stages, int) else self.stages[1]
