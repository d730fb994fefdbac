"""Older generations of the API, over the same core: ``v1`` has the tower words."""
