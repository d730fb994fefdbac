"""Reading programs for ``tf.distribute``: what they use, and what takes its place here."""
