"""Checkpoints on disk: blocks of arrays, the index of their places, and the manifest of the files."""
