# parallelism: 'persistent_dynamic' is for wgmma kernels
import fagen

base = fagen.load("fa2")
attention = base.attention
schedule = base.schedule.replace(parallelism="persistent_dynamic")
