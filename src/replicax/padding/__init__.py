"""Padded batches: where the examples are in each value of a program.

The core asks for it when a step gets padded arguments. The checks of loss scales, and the per-replica executor, follow
examples by the same rules.
"""
