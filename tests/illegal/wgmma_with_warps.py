# warps: 8 given, but a wgmma kernel is sized by `consumers`
import fagen

base = fagen.load("fa3")
attention = base.attention
schedule = base.schedule.replace(warps=8)
