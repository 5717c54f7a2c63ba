"""From FlashAttention-2 to -3, step 4: within a warpgroup too, the softmax of a block runs under the P·V of the block before."""

import fagen

attention, before = fagen.load("chain/fa2_to_fa3_3_pingpong")
schedule = before.replace(overlap="both")
tiles = {
    64: {"tile_q": 192, "tile_kv": 128, "consumers": 3},
    256: {"tile_q": 128, "tile_kv": 80, "consumers": 2},
}
