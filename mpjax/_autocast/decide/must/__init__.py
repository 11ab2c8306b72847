"""Must be float32: rounding would change a result by more than the products round it."""
