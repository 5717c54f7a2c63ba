# overlap: 'pingpong' needs roles 'producer'
import fagen

base = fagen.load("fa3")
attention = base.attention
schedule = base.schedule.replace(roles="uniform", overlap="pingpong")
