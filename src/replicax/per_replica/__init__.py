"""The exact executor: a step as plain Python, once for each replica."""
