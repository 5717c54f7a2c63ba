# not-yet: True is part of the design
import fagen

base = fagen.load("fa2")
attention = base.attention.replace(sink=True)
schedule = base.schedule
