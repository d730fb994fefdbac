"""Uneven steps: the programs of replicas that differ in size become one."""
