"""The watchdog finds workers that hang or keep others waiting, from outside the process."""
