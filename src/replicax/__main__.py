"""``python -m replicax``: the program ``replicax``."""

import sys

from replicax.cli import main

sys.exit(main())
