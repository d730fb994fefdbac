"""Devices: choosing them, placing replicas on them, and putting values on them."""
