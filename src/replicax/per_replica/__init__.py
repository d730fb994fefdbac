"""The per-replica executor: a step as plain Python, once for each replica."""
