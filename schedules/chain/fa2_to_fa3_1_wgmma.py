"""From FlashAttention-2 to -3, step 1: Hopper's matrix unit, fed by TMA. Architecture, matrix unit and movement move together, and the
tile sizes with them; the roles stay alike, and nothing overlaps yet."""

from fagen import Attention, Schedule

attention = Attention(head_dim=128)
schedule = Schedule(
    arch="sm_90a",
    tile_q=128,
    tile_kv=176,
    parallelism="query_tiles",
    roles="uniform",
    consumers=2,
    movement="tma",
    mma="wgmma",
    stages=2,
)
tiles = {
    64: {"tile_q": 192, "tile_kv": 128, "consumers": 3},
    256: {"tile_q": 128, "tile_kv": 80, "consumers": 2},
}
