"""What a compiled program's text (HLO) says: instructions, loops, collectives, memory."""
