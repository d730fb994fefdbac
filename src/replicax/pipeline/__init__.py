"""Pipelines: programs whose operations are placed on logical devices, and so become many programs."""
