# mma-movement: not tma
import fagen

base = fagen.load("fa2")
attention = base.attention
schedule = base.schedule.replace(movement="tma")
