# skip-masked: lets the warpgroups of a tile compute different blocks, which needs mask 'causal'
import fagen

base = fagen.load("fa3")
attention = base.attention
schedule = base.schedule.replace(skip_masked=True)
