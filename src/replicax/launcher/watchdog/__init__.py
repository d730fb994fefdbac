"""The watchdog: finds workers that hang (``hang_watch``) or keep others waiting (``stragglers``), from outside them."""
