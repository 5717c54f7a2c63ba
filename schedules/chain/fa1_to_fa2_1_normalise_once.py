"""From FlashAttention-1 to -2, step 1: O is divided by the row sum once, at the end, not after every block."""

import fagen

attention, before = fagen.load("fa1")
schedule = before.replace(normalise="once")
tiles = {
    64: {"tile_q": 32, "tile_kv": 256, "warps": 4},
    256: {"tile_q": 16, "tile_kv": 128, "warps": 4},
}
