"""NVIDIA GPUs: the models that can be planned for, what clouds call machines with them, and which GPUs there are."""
