# dtype: 'fp32' is not one of
import fagen

base = fagen.load("fa3")
attention = base.attention.replace(dtype="fp32")
schedule = base.schedule
