"""Workers: the processes that run one program together, what they tell each other, and how they end."""
