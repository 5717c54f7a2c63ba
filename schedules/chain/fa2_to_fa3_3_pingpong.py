"""From FlashAttention-2 to -3, step 3: warpgroups take turns, so that one's softmax runs under the other's matrix products."""

import fagen

attention, before = fagen.load("chain/fa2_to_fa3_2_producer")
schedule = before.replace(overlap="pingpong")
tiles = {
    64: {"tile_q": 192, "tile_kv": 128, "consumers": 3},
    256: {"tile_q": 128, "tile_kv": 80, "consumers": 2},
}
