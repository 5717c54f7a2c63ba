# v-dtype: only with dtype 'int8' does it have its own
import fagen

base = fagen.load("fa3")
attention = base.attention.replace(v_dtype="fp16")
schedule = base.schedule
