"""From FlashAttention-1 to -2, step 3: a CTA for every query tile, not for every head."""

import fagen

attention, before = fagen.load("chain/fa1_to_fa2_2_q_outer")
schedule = before.replace(parallelism="query_tiles")
tiles = {
    64: {"tile_q": 32, "tile_kv": 256, "warps": 4},
    256: {"tile_q": 16, "tile_kv": 128, "warps": 4},
}
