"""Draws the pictures of docs/placement.md: ``python docs/placement_pictures.py [folder]``; by default into docs/.

It runs the page's own examples, and draws at each picture the ``strategy``, ``model`` and ``program`` that there are
then: so a picture shows what the code above it makes.
"""

from __future__ import annotations

import doctest
import re
import sys
from pathlib import Path

import replicax

PAGE = Path(__file__).parent / "placement.md"
BLOCK_OR_PICTURE = re.compile(r"^```python\n(.*?)^```$|^!\[.*?\]\((placement-\w+\.svg)\)$", re.MULTILINE | re.DOTALL)


def main(folder: Path) -> None:
    replicax.use_cpu_devices(8)
    names: dict[str, object] = {"__name__": "placement"}
    for block, picture in BLOCK_OR_PICTURE.findall(PAGE.read_text()):
        if picture:
            strategy, (variables, *_), program = (names[name] for name in ("strategy", "model", "program"))
            strategy.extended.plot(folder / picture, program, variables)
        else:
            source = (
                block if ">>>" not in block else "".join(e.source for e in doctest.DocTestParser().get_examples(block))
            )
            exec(compile(source, str(PAGE), "exec"), names)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
