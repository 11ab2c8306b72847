"""What `train_pod.py` stands on: its config file, its corpus, its checkpoints, its processes.

A part of the example and not of the library: take it along and change it.
"""
