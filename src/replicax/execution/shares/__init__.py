"""Shares: whether a loss that is differentiated is this replica's share of the whole, as its gradients are summed."""
