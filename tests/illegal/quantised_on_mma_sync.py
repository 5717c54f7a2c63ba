# precision: e4m3 has no fast path on mma_sync
import fagen

base = fagen.load("fa2")
attention = base.attention
schedule = base.schedule.replace(precision="e4m3")
