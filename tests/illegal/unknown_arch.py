# arch: 'sm_100a' is not one of 'sm_80', 'sm_90', 'sm_90a'
import fagen

base = fagen.load("fa3")
attention = base.attention
schedule = base.schedule.replace(arch="sm_100a")
