"""Parameter servers: which has which part of a variable, and how updates change it."""
