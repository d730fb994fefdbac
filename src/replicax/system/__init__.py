"""The operating system and other processes: exit codes, GPU memory, files, network addresses, and a registry."""
