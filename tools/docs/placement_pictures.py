"""Draws the pictures of docs/placement.md: ``python tools/docs/placement_pictures.py [folder]``; by default into docs/.

It runs the page's own examples, and draws at each picture the ``strategy``, ``model`` and ``program`` that there are
then: so a picture shows what the code above it makes. Only ``look`` is another one, which trains nothing.
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

    def look(name: str, strategy: replicax.Strategy, model: Any) -> replicax.Executable:
        [batch] = strategy.distribute_dataset([names["data"]])
        return strategy.extended.trace(model[-1], args=(batch,))

    parser = doctest.DocTestParser()
    blocks = BLOCK_OR_PICTURE.findall(PAGE.read_text())
    while any(picture for _, picture in blocks):
        block, picture = blocks.pop(0)
        if picture:
            names["strategy"].extended.plot(folder / picture, names["program"], names["model"][0])
        else:
            examples = parser.get_examples(block)  # none in a block without prompts
            source = "".join(example.source for example in examples) if examples else block
            exec(compile(source, str(PAGE), "exec"), names)
            names["look"] = look


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS)
