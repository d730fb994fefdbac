"""Every public name: those of the package, and those that a public room has."""

from __future__ import annotations

import replicax

PUBLIC = [
    *(f"replicax.{name}" for name in replicax.__all__),
    *(f"{module}.{name}" for module, names in replicax._MOVED.items() for name in names),
]
