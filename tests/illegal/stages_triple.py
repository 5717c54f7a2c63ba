# stages: (1, 2, 3) is neither
import fagen

base = fagen.load("fa3")
attention = base.attention
schedule = base.schedule.replace(stages=(1, 2, 3))
