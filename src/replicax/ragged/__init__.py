"""Ragged steps: the programs of replicas that differ in size become one.

Separate programs for each size, with the collectives in between, would need a dispatch for each part of the step.
"""
