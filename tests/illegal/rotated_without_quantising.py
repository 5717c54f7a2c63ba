# hadamard: which needs precision 'e4m3', 'int8' or 'int8_qk' and 16-bit tensors
import fagen

base = fagen.load("fa3_fp8")
attention = base.attention
schedule = base.schedule.replace(hadamard=True)
