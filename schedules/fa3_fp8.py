"""FlashAttention-3 in FP8 (Shah et al. 2024, section 3.3) with a stale softmax reference: e4m3 products, V transposed in shared memory by the
producer's idle warps, exponentials that do not wait for their block's maximum. What the paper describes is chain/fa3_to_fa3_fp8_1_e4m3."""

from fagen import Attention, Schedule

attention = Attention(head_dim=128, dtype="e4m3", out_dtype="bf16")
schedule = Schedule(
    arch="sm_90a",
    tile_q=128,
    tile_kv=128,
    parallelism="persistent_dynamic",
    roles="producer",
    consumers=2,
    movement="tma",
    mma="wgmma",
    stages=3,
    stages_q=2,
    overlap="within",
    reference="stale",
    scale_granularity="head",
)
tiles = {
    64: {"tile_q": 256, "tile_kv": 64, "consumers": 4, "stages": 4},
    256: {"tile_kv": 96, "stages": 2, "stages_q": None, "overlap": "both", "fuse_tiles": True},
    # Beside P·V in 16 bits a block is smaller: P takes twice the registers. (At head_dim 64, scales of blocks under a causal mask leave room
    # for 48 keys.)
    (128, "int8_qk"): {"tile_q": 192, "tile_kv": 64, "consumers": 3, "stages": 4},
    (256, "int8_qk"): {"tile_kv": 64, "stages_q": None},
}
