"""When each kernel and each collective of a compiled step runs: a walk through its schedule."""
