"""Operations computed at once, while somebody watches: what the exact executor stands on."""
