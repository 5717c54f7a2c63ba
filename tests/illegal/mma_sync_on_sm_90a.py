# arch-mma: sm_90a runs wgmma kernels, not mma_sync
import fagen

base = fagen.load("fa2")
attention = base.attention
schedule = base.schedule.replace(arch="sm_90a")
