"""Older generations of the API on the same core: ``v1`` has the API with towers."""
