"""What single knobs may be: the values of the design, those that no kernel honours yet, and the ends of ranges."""

from __future__ import annotations

from ...target import TARGETS

CHOICES: dict[str, tuple[object, ...]] = {
    # attention
    "dtype": ("bf16", "fp16", "e4m3", "int8"),
    "v_dtype": (None, "e4m3", "bf16", "fp16"),
    "out_dtype": (None, "bf16", "fp16"),
    "mask": ("full", "causal", "window"),
    "sink": (False, True),
    # schedule
    "arch": tuple(TARGETS),
    "loop_order": ("q_outer", "kv_outer"),
    "parallelism": ("batch_heads", "query_tiles", "persistent_static", "persistent_dynamic", "kv_splits"),
    "partition": ("split_q", "split_kv"),
    "roles": ("uniform", "producer"),
    "warps": (None, 1, 2, 4, 8),
    "consumers": (None, 1, 2, 3, 4),
    "movement": ("ld_st", "cp_async", "tma"),
    "mma": ("mma_sync", "wgmma"),
    "q_operand": (None, "registers"),
    "p_operand": ("registers", "shared"),
    "overlap": ("none", "within", "pingpong", "both"),
    "fuse_tiles": (False, True),
    "skip_masked": (False, True),
    "softmax": ("fused", "three_pass", "two_pass"),
    "normalise": ("once", "each_step"),
    "reference": ("running", "stale"),
    "scale_granularity": (None, "tensor", "head", "block"),
    "precision": (None, "e4m3", "int8", "int8_qk"),
    "hadamard": (False, True),
    "smooth_k": (False, True),
    "v_transposed": (False, True),
}
"""Fields that take one of a few values."""

NOT_YET: dict[str, tuple[object, ...]] = {
    "mask": ("window",),
    "sink": (True,),
    "parallelism": ("kv_splits",),
    "p_operand": ("shared",),
}
"""Values of the design that no kernel honours yet: rejected with code not-yet. The knob walk holds this list."""

NOT_YET_SET = ("window", "softcap")
"""Fields that must stay None until a kernel honours them."""

HEAD_DIMS = (64, 128, 256)
MAX_STAGES = 4
MAX_TILE_KV = 256
INT8_DEPTH = (1 << 24) // 127**2
"""Columns up to which a score of int8 values (±127) stays below 2^24, where float32 is exact."""
SCALES = (1e-30, 256.0)
"""Smallest and largest softmax scale: as far as kernels are checked. What needs a larger one has q and k of so little that e4m3 has few
numbers for them; their descales, or the tensors, are where such a factor belongs."""
