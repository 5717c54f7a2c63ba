# head-dim-v: 64 differs from head_dim 128
import fagen

base = fagen.load("fa3")
attention = base.attention.replace(head_dim_v=64)
schedule = base.schedule
