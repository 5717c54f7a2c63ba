"""fa3_fp8 on bf16 tensors: rotated, quantised and attended to in one plan. In a bench it stands beside `fa3`, on the same tensors."""

from fagen import Attention, load

base = load("fa3_fp8")
attention = Attention(head_dim=128)
schedule = base.schedule.replace(precision="e4m3", hadamard=True)
tiles = {
    64: {"tile_q": 256, "tile_kv": 64, "consumers": 4, "stages": 4},
    256: {"tile_kv": 96, "stages": 2, "stages_q": None, "overlap": "both", "fuse_tiles": True},
}
