"""Predict when each kernel and collective of a compiled step runs, and what is in memory when it is fullest."""
