"""From FlashAttention-2 to -3, step 2: warps specialise. A producer warpgroup issues the loads, and gives its registers to those that
compute."""

import fagen

attention, before = fagen.load("chain/fa2_to_fa3_1_wgmma")
schedule = before.replace(roles="producer")
tiles = {
    64: {"tile_q": 192, "tile_kv": 128, "consumers": 3},
    256: {"tile_q": 128, "tile_kv": 80, "consumers": 2},
}
