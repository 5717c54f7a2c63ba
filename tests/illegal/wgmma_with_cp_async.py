# mma-movement: wgmma takes its operands by tma, not cp_async
import fagen

base = fagen.load("fa3")
attention = base.attention
schedule = base.schedule.replace(movement="cp_async")
