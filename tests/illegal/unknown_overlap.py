# overlap: 'ping-pong' is not one of
import fagen

base = fagen.load("fa3")
attention = base.attention
schedule = base.schedule.replace(overlap="ping-pong")
