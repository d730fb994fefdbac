"""Real ``tf.distribute`` beside Replicax: the same programs on both, and a table of where they differ and why."""
