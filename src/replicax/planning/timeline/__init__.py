"""When each kernel and each collective of a compiled step runs, and what is in memory when it is fullest."""
