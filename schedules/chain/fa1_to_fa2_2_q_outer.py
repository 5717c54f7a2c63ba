"""From FlashAttention-1 to -2, step 2: the loops change places. A query tile stays, and O, m and l stay in registers with it."""

import fagen

attention, before = fagen.load("chain/fa1_to_fa2_1_normalise_once")
schedule = before.replace(loop_order="q_outer")
tiles = {
    64: {"tile_q": 32, "tile_kv": 256, "warps": 4},
    256: {"tile_q": 16, "tile_kv": 128, "warps": 4},
}
