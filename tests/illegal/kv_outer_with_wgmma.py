# loop-order: 'kv_outer' is for mma_sync kernels
import fagen

base = fagen.load("fa3")
attention = base.attention
schedule = base.schedule.replace(loop_order="kv_outer")
