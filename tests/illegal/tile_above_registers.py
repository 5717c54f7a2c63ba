# registers: S 128 + P 64 + O 128 registers
import fagen

base = fagen.load("fa2")
attention = base.attention
schedule = base.schedule.replace(tile_q=256, tile_kv=128)
