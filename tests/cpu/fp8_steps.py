"""Steps towards fa3_fp8, as bases for tests of one knob."""

PAPER_FP8 = "chain/fa3_to_fa3_fp8_1_e4m3"
"""FlashAttention-3's own FP8, with ping-pong and a running maximum: nearly every knob can be changed on it."""
STALE_FP8 = "chain/fa3_to_fa3_fp8_2_stale"
"""The same against a stale reference, without ping-pong: at head_dim 64 and 128 `fa3_fp8` but for the slot of the next tile's Q."""
