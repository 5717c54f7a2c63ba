# stages: 5 is neither a number from 1 to 4 nor
import fagen

base = fagen.load("fa3")
attention = base.attention
schedule = base.schedule.replace(stages=5)
