"""A step as a program: what it is as data, and what is known of its values."""
