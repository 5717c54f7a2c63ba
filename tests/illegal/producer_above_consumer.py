# registers: the consumer gets 152, less than the producer's 160
import fagen

base = fagen.load("fa3")
attention = base.attention
schedule = base.schedule.replace(tile_kv=16, registers=(160, 152))
