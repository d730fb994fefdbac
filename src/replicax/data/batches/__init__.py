"""Make the global batches that steps get from the local batches that a worker reads."""
