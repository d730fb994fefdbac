"""The loss-scale check: are gradients that replicas sum the gradients of losses that are scaled for a sum?"""
