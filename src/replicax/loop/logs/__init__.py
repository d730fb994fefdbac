"""Logs of a run: files of its numbers, and the progress bar."""
