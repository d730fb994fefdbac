from __future__ import annotations

import gc

import numpy as np
import pytest

from replicax.integrations.converted_dataset import Converted, check_array


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        ("text", r"^element 3\['x'\] is str 'text', which is not an array of numbers\. Cure\.$"),
        (b"bytes", r"is bytes b'bytes', which"),
        (object(), r"is object <object"),
        ("long" * 100, r"is str 'long.{40,60}…, which"),
        (np.str_("a"), r"is an array of strings"),
        (np.array(["a"]), r"is an array of strings, which can't be laid on a device\. Cure\.$"),
        (np.array([b"a"]), r"is an array of strings"),
        (
            np.array([[1], [1, 2]], object),
            r"is an array of objects, such as rows that differ in length, which can't be",
        ),
    ],
)
def test_what_is_no_array(leaf, message) -> None:
    with pytest.raises(TypeError, match=message):
        check_array(leaf, "element 3['x']", "Cure.")


@pytest.mark.usefixtures("young_heap")
def test_the_iterator_underneath_goes_when_ours_goes() -> None:
    open_iterators = []

    class Workers:
        def __iter__(self):
            open_iterators.append(self)
            try:
                yield from range(5)
            finally:
                open_iterators.remove(self)

    for end in (lambda iterator: iterator.close(), lambda iterator: None):
        iterator = iter(Converted(Workers(), lambda element, where: element))
        assert next(iterator) == 0
        assert open_iterators
        end(iterator)
        del iterator
        gc.collect()
        assert not open_iterators
