"""Draws the pictures of the README: ``tools/docs/readme_pictures.py [folder]``, or into docs/.

The run is the one of ``examples/gallery/nnx/gpt.py`` in ``docs/site/curves.json``, which ``docs/site/curves.py``
measures. The plan is the top of ``docs/plan-page.png``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PROGRAM = "gallery/nnx/gpt.py"
TITLE, TIME, LEFT, RIGHT = (25, 398), (1935, 2180), 76, 1046  # in pixels of the page of the plan

sys.path.insert(0, str(DOCS / "site"))

from gallery import drawn, known_curves  # noqa: E402  (docs/site is no package)


def plan() -> Image.Image:
    """The title, the memory of one device and the predicted time of a step, one below the other."""
    page = Image.open(DOCS / "plan-page.png").convert("RGB")
    parts = [page.crop((LEFT, top, RIGHT, bottom)) for top, bottom in (TITLE, TIME)]
    picture = Image.new("RGB", (parts[0].width, sum(part.height for part in parts)), "white")
    top = 0
    for part in parts:
        picture.paste(part, (0, top))
        top += part.height
    return picture.quantize(256)


def main() -> None:
    """The command."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS
    (folder / "run.svg").write_bytes(drawn(known_curves()[PROGRAM]))
    plan().save(folder / "plan-top.png", optimize=True)


if __name__ == "__main__":
    main()
