"""A plan in words and pictures: on the terminal, and as a page."""
