# tile-kv: 96 is not a multiple of 16 keys for each of 4 warps
import fagen

base = fagen.load("fa1")
attention = base.attention
schedule = base.schedule.replace(tile_kv=96)
