"""The operating system and other processes: exit codes, GPU memory, files, network addresses, text, and a registry."""
