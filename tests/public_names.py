"""Every public name: those of the package, and those of public subpackages."""

from __future__ import annotations

import replicax

PUBLIC = [f"{module}.{name}" for name, module in replicax._PLACES.items()]
