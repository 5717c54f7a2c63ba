"""From FlashAttention-1 to -2, step 4: warps share the tile's queries, not the block's keys, so nothing is merged. Tile sizes and the
number of warps move with it, since a warp now holds the rows of its own queries only."""

import fagen

attention, before = fagen.load("chain/fa1_to_fa2_3_query_tiles")
schedule = before.replace(partition="split_q", tile_q=128, tile_kv=64, warps=8)
tiles = {
    64: {"tile_q": 128, "tile_kv": 128, "warps": 8},
    256: {"tile_q": 128, "tile_kv": 64, "warps": 8},
}
