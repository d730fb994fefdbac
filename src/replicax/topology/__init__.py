"""Devices: which there are, how replicas lie on them."""
