"""Models of other libraries as arguments of steps, an adapter each, loaded with its library; and models in files."""

from typing import TYPE_CHECKING, Any

from replicax.models.exported_step import export

__all__ = ["export"]


if TYPE_CHECKING:
    from replicax.models import safetensors as safetensors
else:

    def __getattr__(name: str) -> Any:
        if name == "safetensors":  # it needs much more than the adapters, which every step with a model loads
            import replicax.models.safetensors as module

            return module
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
