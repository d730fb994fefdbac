"""From the local batches that a worker reads to the global batches that steps get."""
