# tile-kv: gives 384 copies of 16 bytes a block, which 256 threads cannot share evenly
import fagen

base = fagen.load("fa2")
attention = base.attention.replace(head_dim=64)
schedule = base.schedule.replace(tile_kv=48)
