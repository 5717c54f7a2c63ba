"""FlashAttention-1 (Dao et al. 2022): a CTA a head; K/V blocks outside, query tiles inside, O, m and l reloaded, corrected, normalised
and stored for every block; warps share a block's keys and merge through shared memory."""

from fagen import Attention, Schedule

attention = Attention(head_dim=128)
schedule = Schedule(
    arch="sm_90",
    tile_q=32,
    tile_kv=256,
    loop_order="kv_outer",
    parallelism="batch_heads",
    partition="split_kv",
    roles="uniform",
    warps=4,
    movement="ld_st",
    mma="mma_sync",
    normalise="each_step",
)
tiles = {
    64: {"tile_q": 32, "tile_kv": 256, "warps": 4},
    256: {"tile_q": 16, "tile_kv": 128, "warps": 4},
}
