# overlap: 'pingpong' takes turns between at least 2 consumers, there is 1
import fagen

base = fagen.load("fa3")
attention = base.attention
schedule = base.schedule.replace(tile_q=64, consumers=1, overlap="pingpong")
