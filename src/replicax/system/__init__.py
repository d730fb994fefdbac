"""What other processes and the operating system do to this one."""
