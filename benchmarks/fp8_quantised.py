"""fa3_fp8 on bf16 tensors: rotated, quantised and attended to in one plan. In a bench it stands beside `fa3`, on the same tensors."""

from fagen import Attention, load

base = load("fa3_fp8")
attention = Attention(head_dim=128)
schedule = base.schedule.replace(precision="e4m3", hadamard=True)
tiles = {
    head_dim: {name: its for name, (_, its) in base.schedule.diff(load("fa3_fp8", head_dim=head_dim).schedule).items()}
    for head_dim in (64, 256)
}
