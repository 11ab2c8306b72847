"""Products in 8 bits: which they are, what is known of their operands, amax histories."""
