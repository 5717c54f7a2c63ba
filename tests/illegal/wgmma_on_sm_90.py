# arch-mma: sm_90 runs mma_sync kernels, not wgmma
import fagen

base = fagen.load("fa3")
attention = base.attention
schedule = base.schedule.replace(arch="sm_90")
