# tile-q: 100 is not a multiple of 16
import fagen

base = fagen.load("fa2")
attention = base.attention
schedule = base.schedule.replace(tile_q=100)
