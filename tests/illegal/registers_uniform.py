# registers: uniform roles keep what they are launched with
import fagen

base = fagen.load("fa3")
attention = base.attention
schedule = base.schedule.replace(roles="uniform", overlap="none", registers=(24, 240))
