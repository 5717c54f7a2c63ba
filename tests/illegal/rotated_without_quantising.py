# hadamard: which needs precision 'e4m3' or 'int8' and 16-bit tensors
import fagen

base = fagen.load("fa3_fp8")
attention = base.attention
schedule = base.schedule.replace(hadamard=True)
