"""Elements: from the batches that a worker reads to what a step gets."""
