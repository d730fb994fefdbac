"""Devices: how to choose them, how replicas are placed on them, and what arrays on them can hold."""
