"""From FlashAttention-3 to its FP8 form as it is here, step 2: a stale softmax reference. Exponentials need not wait for the maximum of their
block: a warpgroup has enough to do under its own products, and takes no turns with the other. Blocks are smaller, and a third one is on its
way. What is left to fa3_fp8 itself: the next tile's Q is loaded while this one is computed, or (head_dim 256) tiles of 96 keys are
joined, and warpgroups take turns again."""

import fagen

attention, before = fagen.load("chain/fa3_to_fa3_fp8_1_e4m3")
schedule = before.replace(reference="stale", overlap="within", tile_kv=128, stages=3)
tiles = {
    64: {"tile_q": 256, "tile_kv": 64, "consumers": 4, "stages": 4},
    (128, "int8_qk"): {"tile_q": 192, "tile_kv": 64, "consumers": 3, "stages": 4},
    256: {"tile_kv": 64},
}
