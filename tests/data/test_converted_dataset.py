from __future__ import annotations

import collections
import gc

import ml_dtypes
import numpy as np
import pytest

from replicax.integrations.converted_dataset import Converted, check_array, convert_leaves

Pair = collections.namedtuple("Pair", "a b")


class Rows(dict):
    """A container that JAX doesn't know."""


def test_containers_stay_what_they_are() -> None:
    element = Pair([1, (2, None)], Rows(x={"y": 3}))
    got = convert_leaves(element, "element 0", lambda leaf, where: (where, leaf))
    assert got == Pair(
        [("element 0.a[0]", 1), (("element 0.a[1][0]", 2), None)], Rows(x={"y": ("element 0.b['x']['y']", 3)})
    )
    assert type(got) is Pair
    assert type(got.b) is Rows


@pytest.mark.parametrize(
    "leaf", [1, True, 0.5, 2j, np.float32(1), np.zeros(2), np.zeros(2, bool), np.zeros(2, ml_dtypes.bfloat16)], ids=repr
)
def test_numbers_pass(leaf) -> None:
    assert check_array(leaf, "x", "") is leaf


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


def test_again_and_again_with_the_number_of_the_element() -> None:
    converted = Converted([10, 20], lambda element, where: (element, where))
    assert list(converted) == list(converted) == [(10, "element 0"), (20, "element 1")]


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
