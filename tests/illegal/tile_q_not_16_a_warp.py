# tile-q: 64 is not a multiple of 16 rows for each of 8 warps
import fagen

base = fagen.load("fa2")
attention = base.attention
schedule = base.schedule.replace(tile_q=64)
