"""TPU slices: cores, hosts and links, which replica gets which core, and pictures of it."""
