"""Replicas that share a device: what each does by itself, and where those of a device come together."""
