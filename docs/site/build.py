"""Build the site: ``make docs``, or ``python docs/site/build.py [folder]``; by default into ``build/site``.

A warning of Sphinx is an error, and so is a search that does not find its page. The result is a folder of files that
needs no server and no network.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from pages import ROOT, assemble
from searches import headings_of_index, not_found


def main() -> int:
    """The command."""
    target = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "site").resolve()
    source = target.with_name(f"{target.name}-source")
    assemble(source)
    options = ["--fail-on-warning", "--keep-going", "--fresh-env", "--jobs", "auto", "--quiet"]
    sphinx = [sys.executable, "-m", "sphinx", "-b", "html", "-c", str(Path(__file__).parent), *options]
    settings = os.environ | {"JAX_PLATFORMS": "cpu"}
    status = subprocess.run([*sphinx, str(source), str(target)], env=settings, check=False).returncode
    if not status and (lost := not_found(headings_of_index(target / "searchindex.js"))):
        print(f"the site's search does not find {'; '.join(lost)}", file=sys.stderr)
        return 1
    if not status:
        print(f"the site is in {os.path.relpath(target)}: open index.html")
    return status


if __name__ == "__main__":
    sys.exit(main())
