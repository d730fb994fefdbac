"""Devices: which there are, how replicas lie on them, and what arrays on them can hold."""
