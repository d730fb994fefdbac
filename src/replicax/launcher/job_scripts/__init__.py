"""Writes a launch as a job of a scheduler: as a Slurm script or a Kubernetes manifest."""
