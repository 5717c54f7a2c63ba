"""From FlashAttention-2 to -3, step 5: one CTA an SM, which goes from tile to tile, so that a tile's end hides under the next one's
start. What is left to fa3 itself: tiles claimed at run time instead of dealt out."""

import fagen

attention, before = fagen.load("chain/fa2_to_fa3_4_within")
schedule = before.replace(parallelism="persistent_static")
tiles = {
    64: {"tile_q": 192, "tile_kv": 128, "consumers": 3},
    256: {"tile_q": 128, "tile_kv": 80, "consumers": 2},
}
