"""Parameter servers: the parts of variables that each has, and updates of them."""
