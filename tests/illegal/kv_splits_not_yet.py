# not-yet: 'kv_splits' is part of the design
import fagen

base = fagen.load("fa2")
attention = base.attention
schedule = base.schedule.replace(parallelism="kv_splits")
