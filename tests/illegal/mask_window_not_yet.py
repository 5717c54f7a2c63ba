# not-yet: 'window' is part of the design
import fagen

base = fagen.load("fa3")
attention = base.attention.replace(mask="window", window=(128, 0))
schedule = base.schedule
