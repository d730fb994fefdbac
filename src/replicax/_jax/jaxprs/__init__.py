"""Traced programs: what they consist of, where it comes from, and how it is changed."""
