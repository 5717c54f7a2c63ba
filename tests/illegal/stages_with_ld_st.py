# stages: 2 slots, but a copy by 'ld_st' is over before the next step
import fagen

base = fagen.load("fa1")
attention = base.attention
schedule = base.schedule.replace(stages=2)
