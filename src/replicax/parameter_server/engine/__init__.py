"""The engine: runs the processes of parameter servers and workers, behind a small interface."""
