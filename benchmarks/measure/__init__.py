"""What the benchmark of autocast measures, each kind in a file of its own."""
