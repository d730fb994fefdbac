"""Padded batches: where the examples are in each value of a program."""
