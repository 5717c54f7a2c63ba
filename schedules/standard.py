"""Standard attention: S = Q·Kᵀ to memory in float32, a softmax that reads it three times, P·V. Three kernels, no fusion."""

from fagen import Attention, Schedule

attention = Attention(head_dim=128)
schedule = Schedule(
    arch="sm_90",
    tile_q=128,
    tile_kv=128,
    parallelism="query_tiles",
    roles="uniform",
    warps=8,
    movement="ld_st",
    mma="mma_sync",
    softmax="three_pass",
)
