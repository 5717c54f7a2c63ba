# consumers: needs the number of warpgroups
import fagen

base = fagen.load("fa3")
attention = base.attention
schedule = base.schedule.replace(consumers=None)
