"""Products in 8 bits: the recipe of each, the origin of its operands, amax histories."""
