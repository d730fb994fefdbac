"""The same emulated devices and settings as for the tests of Replicax itself."""

from __future__ import annotations

import tests.conftest  # noqa: F401
