# smem: need 328192 bytes of shared memory, sm_90a has 232448
import fagen

base = fagen.load("fa3")
attention = base.attention
schedule = base.schedule.replace(tile_kv=192, stages=3)
