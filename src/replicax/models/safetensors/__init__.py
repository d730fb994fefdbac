"""Weights in Hugging Face's layout: ``.safetensors`` files, read straight onto the devices, and written."""

from replicax.models.safetensors.loading import load
from replicax.models.safetensors.names import Transposed
from replicax.models.safetensors.saving import save

__all__ = ["Transposed", "load", "save"]
