"""Draws the pictures of docs/placement.md: ``python tools/docs/placement_pictures.py [folder]``; by default into docs/.

It runs the page's own examples, and draws at each picture the last strategy that they looked at: so a picture shows
what the code above it makes. Only ``look`` is another one, which trains nothing.
"""

from __future__ import annotations

import doctest
import re
import sys
from pathlib import Path
from typing import Any

import replicax

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "placement.md"
BLOCK_OR_PICTURE = re.compile(r"^```python\n(.*?)^```$|^!\[.*?\]\((placement-\w+\.svg)\)$", re.MULTILINE | re.DOTALL)


def main(folder: Path) -> None:
    replicax.use_cpu_devices(8)
    names: dict[str, Any] = {"__name__": "placement"}

    looked_at: dict[str, Any] = {}

    def look(name: str, strategy: replicax.Strategy, parts: int = 1) -> replicax.Executable:
        step = names["build"](strategy, parts)
        [batch] = strategy.distribute_dataset([names["data"]])
        program = strategy.extended.trace(step, args=(batch,))
        variables = [v for v in strategy.extended.variables if not v.name.startswith("optimizer")]
        looked_at.update(strategy=strategy, program=program, variables=variables)
        return program

    parser = doctest.DocTestParser()
    blocks = BLOCK_OR_PICTURE.findall(PAGE.read_text())
    while any(picture for _, picture in blocks):
        block, picture = blocks.pop(0)
        if picture:
            looked_at["strategy"].extended.plot(folder / picture, looked_at["program"], looked_at["variables"])
        else:
            examples = parser.get_examples(block)  # none in a block without prompts
            source = "".join(example.source for example in examples) if examples else block
            exec(compile(source, str(PAGE), "exec"), names)
            names["look"] = look


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS)
