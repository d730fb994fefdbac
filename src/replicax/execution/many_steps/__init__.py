"""Many steps in one dispatch."""
