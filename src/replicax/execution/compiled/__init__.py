"""Compiled programs: one program for one replica becomes one for all of them."""
