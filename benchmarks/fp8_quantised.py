"""fa3_fp8 on bf16 tensors: rotated, quantised and attended to in one plan. In a bench it stands beside `fa3`, on the same tensors."""

from fagen import Attention, load

base = load("fa3_fp8")
attention = Attention(head_dim=128)
schedule = base.schedule.replace(precision="e4m3", hadamard=True)
tiles = {64: {"tile_q": 192, "tile_kv": 160, "consumers": 3}, 256: {"tile_q": 128, "tile_kv": 96, "consumers": 2}}
