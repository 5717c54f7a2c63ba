# mask: 'diagonal' is not one of 'full', 'causal'
import fagen

base = fagen.load("fa3")
attention = base.attention.replace(mask="diagonal")
schedule = base.schedule
