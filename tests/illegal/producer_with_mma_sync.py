# roles: 'producer' needs wgmma
import fagen

base = fagen.load("fa2")
attention = base.attention
schedule = base.schedule.replace(roles="producer")
