"""The engine that runs the processes of parameter servers and workers, behind one small interface."""
