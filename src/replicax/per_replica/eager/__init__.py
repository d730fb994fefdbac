"""Operations that are computed one by one, for the per-replica executor."""
