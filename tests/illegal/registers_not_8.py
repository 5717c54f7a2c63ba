# registers: (24, 250) is not a (producer, consumer) pair of multiples of 8
import fagen

base = fagen.load("fa3")
attention = base.attention
schedule = base.schedule.replace(registers=(24, 250))
