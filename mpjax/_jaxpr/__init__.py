"""Programs as data: the class of each primitive, equations bound again, programs inside them."""
