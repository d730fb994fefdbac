"""Reading: the sources of a dataset, and its batches, which workers can divide, and resume at any place."""
