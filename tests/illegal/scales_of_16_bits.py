# scale-granularity: bf16 tensors have no scales
import fagen

base = fagen.load("fa3")
attention = base.attention
schedule = base.schedule.replace(scale_granularity="head")
