"""Launches as jobs of a scheduler: the same command, written as a Slurm script or a Kubernetes manifest."""
