# register-pool: 68608 registers exceed the 64512
import fagen

base = fagen.load("fa3")
attention = base.attention
schedule = base.schedule.replace(registers=(56, 240))
