"""From FlashAttention-3 to its FP8 form as it is here, step 1: the products in e4m3, V transposed by the producer's idle warps. This is the
paper's FP8 (Shah et al. 2024, section 3.3)."""

import fagen

attention = fagen.Attention(head_dim=128, dtype="e4m3", out_dtype="bf16")
schedule = fagen.load("fa3").schedule.replace(tile_kv=224, scale_granularity="head")
tiles = {
    64: {"tile_q": 192, "tile_kv": 160, "consumers": 3},
    (64, "int8_qk"): {"tile_q": 192, "tile_kv": 128, "consumers": 3},
    (128, "int8"): {"tile_kv": 192},  # 224 keys spill under a causal mask
    (128, "int8_qk"): {"tile_kv": 128},
    256: {"tile_q": 128, "tile_kv": 96, "consumers": 2},  # 128 keys spill beside O and the transposition's registers
    (256, "int8_qk"): {"tile_kv": 64},
}
