# scale: nan is not a positive finite number
import fagen

base = fagen.load("fa3")
attention = base.attention.replace(scale=float("nan"))
schedule = base.schedule
