# warps: needs its number of warps
import fagen

base = fagen.load("fa2")
attention = base.attention
schedule = base.schedule.replace(warps=None)
