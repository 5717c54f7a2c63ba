# tile-q: 192 is not 64 rows for each of 2 warpgroups
import fagen

base = fagen.load("fa3")
attention = base.attention
schedule = base.schedule.replace(tile_q=192)
