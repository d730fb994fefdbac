"""Wrapped steps: what replicax.train does around a step, and you can in a loop of your own."""
