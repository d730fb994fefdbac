"""A program: reads datasets with a Grain that lacks names, ``python -m tests.data.hidden_names Class Class.attribute``.

It prints the warnings, and a dataset of batches with its length.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile
import warnings
from typing import Any

import grain

_TYPICAL = ("shuffle, repeat, batch", "batch, iterate, filter", "concatenate", "random")
_CLASSES = {
    type(node).__name__: type(node)
    for source in [grain.MapDataset.source([0, 1])]
    for node in (source, source.seed(0), source.shuffle(seed=0), source.filter(bool), source.repeat(2), source.batch(2))
} | {"MapDataset": grain.MapDataset}


def hide(name: str) -> None:
    """Rename a class of Grain's nodes, or hide one of its attributes from all code outside Grain."""
    kind, _, attribute = name.partition(".")
    cls: Any = _CLASSES[kind]
    if not attribute:
        cls.__name__ = f"New{kind}"
    elif attribute == "_getitems":
        cls._get_several = cls._getitems
        del cls._getitems
    else:
        usual = cls.__getattribute__

        def looked_up(self: Any, wanted: str) -> Any:
            if wanted == attribute and not sys._getframe(1).f_globals["__name__"].startswith("grain."):
                raise AttributeError(wanted)
            return usual(self, wanted)

        cls.__getattribute__ = looked_up


def main() -> None:
    for name in sys.argv[1:]:
        hide(name)
    import tests.data.conftest  # noqa: F401
    from tests.data import test_grain_graphs as graphs
    from tests.data.simulated import Run

    with warnings.catch_warnings(record=True) as caught, tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("always")
        lines = graphs.write_lines(pathlib.Path(folder))
        for make in (graphs.numbered_batches, graphs.batches_one_by_one, *(graphs.GRAPHS[name] for name in _TYPICAL)):
            graphs.check_graph(make, may_refuse=True)
        graphs.check_graph(lambda: graphs.FILED["filter, batch"](lines()), may_refuse=True)
        graphs.check_graph(lambda: lines().batch(4), may_refuse=True)
        [dataset] = Run(lambda context: graphs.numbered_batches(), 1, 2).datasets
    print(*{str(each.message) for each in caught}, sep="\n")
    print(repr(dataset), dataset.cardinality)


if __name__ == "__main__":
    main()
