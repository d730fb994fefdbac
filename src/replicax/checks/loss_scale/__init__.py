"""The loss-scale check: warns of summed gradients whose losses are not scaled for a sum."""
