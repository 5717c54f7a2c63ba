"""FlashAttention-3 in FP8 (Shah et al. 2024, section 3.3): e4m3 products, V transposed in shared memory by the producer's idle warps."""

from fagen import Attention, Schedule

attention = Attention(head_dim=128, dtype="e4m3", out_dtype="bf16")
schedule = Schedule(
    arch="sm_90a",
    tile_q=128,
    tile_kv=224,
    parallelism="persistent_dynamic",
    roles="producer",
    consumers=2,
    movement="tma",
    mma="wgmma",
    stages=2,
    overlap="both",
    scale_granularity="head",
)
tiles = {
    64: {"tile_q": 192, "tile_kv": 160, "consumers": 3},
    (128, "int8"): {"tile_kv": 192},  # 224 keys spill under a causal mask
    # Beside P·V in 16 bits: nothing is transposed, Q·Kᵀ takes half as long, and the softmax is what a tile waits for. (At head_dim 64, scales
    # of blocks under a causal mask leave room for 48 keys.)
    (64, "int8_qk"): {"tile_q": 256, "tile_kv": 64, "consumers": 4, "stages": 4, "overlap": "within", "reference": "stale"},
    (128, "int8_qk"): {"tile_q": 192, "tile_kv": 64, "consumers": 3, "stages": 4, "overlap": "within", "reference": "stale"},
    (256, "int8_qk"): {"tile_kv": 64, "stages": 3, "overlap": "within", "reference": "stale"},
    256: {"tile_q": 128, "tile_kv": 96, "consumers": 2},  # 128 keys spill beside O and the transposition's registers
}
