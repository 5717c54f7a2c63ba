# head-dim: 96 is not supported
import fagen

base = fagen.load("fa2")
attention = base.attention.replace(head_dim=96)
schedule = base.schedule
