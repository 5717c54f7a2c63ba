"""FlashAttention-2 (Dao 2023): uniform warps that each own query rows, mma.sync, K and V by cp.async."""

from fagen import Attention, Schedule

attention = Attention(head_dim=128)
schedule = Schedule(
    arch="sm_90",
    tile_q=128,
    tile_kv=64,
    parallelism="query_tiles",
    roles="uniform",
    warps=8,
    movement="cp_async",
    mma="mma_sync",
    stages=2,
)
tiles = {
    64: {"tile_q": 128, "tile_kv": 128, "warps": 8},
    256: {"tile_q": 128, "tile_kv": 64, "warps": 8},
}
