"""Devices that several replicas share: what each does by itself, and where those of a device come together.

The core asks for it where there are fewer devices than replicas, and where sums over replicas have a fixed order on any
number of devices (``reproducible=True``).
"""
