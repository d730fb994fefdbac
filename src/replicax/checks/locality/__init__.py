"""The locality check: warns of values that are wrongly the same on every replica, a mistake that raises no error."""
