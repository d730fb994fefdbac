"""Drawing: which device holds what, and which devices tell each other something, as a picture."""
