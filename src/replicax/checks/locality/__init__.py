"""The locality check: warnings of what is the same on every replica, or differs, where that is a mistake in silence."""
