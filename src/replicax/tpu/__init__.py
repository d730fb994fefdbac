"""TPU slices: cores, hosts and links, the assignment of cores to replicas, and pictures of them."""
