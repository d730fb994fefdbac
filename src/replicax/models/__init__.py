"""Models of other libraries as arguments of steps, an adapter each, loaded with its library; and exported models."""

from replicax.models.exported_step import export

__all__ = ["export"]
