"""Which equations run together, and in what order."""
