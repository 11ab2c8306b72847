"""What is done for a compiler's sake. Nothing here decides what may be low."""
