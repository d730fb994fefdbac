"""Read a compiled program's text (HLO): instructions, loops, collectives, memory."""
