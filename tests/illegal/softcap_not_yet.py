# not-yet: 30.0 is part of the design
import fagen

base = fagen.load("fa2")
attention = base.attention.replace(softcap=30.0)
schedule = base.schedule
