# parallelism: 'batch_heads' is for mma_sync kernels
import fagen

base = fagen.load("fa3")
attention = base.attention
schedule = base.schedule.replace(parallelism="batch_heads")
