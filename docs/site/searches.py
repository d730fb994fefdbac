"""What people search the site for, and the page whose heading has those words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

SEARCHES = {
    "mixed precision": "recipes",
    "wandb": "recipes",
    "mlflow": "recipes",
    "gradient accumulation": "recipes",
    "gradient clipping": "recipes",
    "learning-rate schedule": "recipes",
    "early stopping": "recipes",
    "random seed": "recipes",
    "profiling": "recipes",
    "oom": "troubleshooting",
    "out of memory": "troubleshooting",
    "slow": "troubleshooting",
    "hangs": "troubleshooting",
    "nan": "troubleshooting",
    "pytorch": "from_pytorch",
    "notebooks": "notebooks",
    "several gpus": "install",
    "slurm": "install",
}


def not_found(headings: Iterable[tuple[str, str]]) -> list[str]:
    """The searches whose page has no heading with all their words.

    Args:
      headings: pairs of a page's name and one of its headings.
    """
    words = [(page, set(re.findall(r"[\w-]+", heading.lower()))) for page, heading in headings]
    return [
        f"{query!r} on the page {page}"
        for query, page in SEARCHES.items()
        if not any(page == of and all(_has(found, word) for word in query.split()) for of, found in words)
    ]


def _has(words: set[str], word: str) -> bool:
    """Whether a search for ``word`` finds one of ``words``: it need not be whole, as searching finds its stem."""
    return any(found.startswith(word) for found in words)


def headings_of_index(index: Path) -> list[tuple[str, str]]:
    """The headings that a site's search knows, from Sphinx's ``searchindex.js``."""
    data = json.loads(re.sub(r"^Search\.setIndex\(|\)\s*;?\s*$", "", index.read_text()))
    return [(data["docnames"][page], title) for title, places in data["alltitles"].items() for page, _ in places]
