# scale: -0.125 is not a positive finite number
import fagen

base = fagen.load("fa3")
attention = base.attention.replace(scale=-0.125)
schedule = base.schedule
