"""Other libraries' datasets, one file each. A file imports its library, so it is imported only when that is there."""
