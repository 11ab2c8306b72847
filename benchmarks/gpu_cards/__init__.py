"""The cards of `gpu.py`: each measures one thing on the device at hand, in rows of its own."""
