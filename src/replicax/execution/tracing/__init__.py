"""Tracing: from a call of a step to its program."""
