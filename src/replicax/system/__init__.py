"""The operating system and other processes: exit codes, GPU memory, files, and a registry."""
