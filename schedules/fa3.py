"""FlashAttention-3 (Shah et al. 2024): a producer warpgroup feeds WGMMA warpgroups by TMA; softmax hides under matrix products."""

from fagen import Attention, Schedule

attention = Attention(head_dim=128)
schedule = Schedule(
    arch="sm_90a",
    tile_q=128,
    tile_kv=176,
    parallelism="persistent_dynamic",
    roles="producer",
    consumers=2,
    movement="tma",
    mma="wgmma",
    stages=2,
    overlap="both",
)
tiles = {
    64: {"tile_q": 192, "tile_kv": 128, "consumers": 3},
    256: {"tile_q": 128, "tile_kv": 80, "consumers": 2},
}
