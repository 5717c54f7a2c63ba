# tile-kv: 272 is not a multiple of 16 between 16 and 256
import fagen

base = fagen.load("fa3")
attention = base.attention
schedule = base.schedule.replace(tile_kv=272)
