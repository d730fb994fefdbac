"""What a checkpoint is on disk: blocks of arrays, the index that says where they are, and the manifest of its files."""
