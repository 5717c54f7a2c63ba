# softmax: 'three_pass' writes S to memory between kernels with loop_order 'q_outer', not 'kv_outer'
import fagen

base = fagen.load("standard")
attention = base.attention
schedule = base.schedule.replace(loop_order="kv_outer")
