"""Every public name: those of the package, and those that a public room has."""

from __future__ import annotations

import replicax

PUBLIC = [f"{module}.{name}" for name, module in replicax._PLACES.items()]
