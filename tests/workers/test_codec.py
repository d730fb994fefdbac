from __future__ import annotations

import collections
import dataclasses
import enum
import json
import pickle
import struct
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from replicax.workers.codec import declared, dumps, error_as_data, error_from_data, loads


class Point(NamedTuple):
    x: Any
    y: Any


@declared
class Colour(enum.Enum):
    RED = "red"


@declared
@dataclasses.dataclass(frozen=True)
class Leaf:
    print: tuple[Any, ...]
    colours: frozenset[Colour] = frozenset()


@pytest.mark.parametrize(
    "item",
    [
        None,
        [True, -3, 2**70, 0.1, float("inf"), "text \ud800 ü", b"\x00\xff"],
        {"a": (1, [2]), 3: {"b": {1, 2}}, (4, 5): frozenset({6})},
        collections.OrderedDict([("b", 1), ("a", 2)]),
        Point(1, [Point("x", None)]),
        np.dtype("float32"),
        np.dtype(jnp.bfloat16),
        [Leaf((1, "a", b"c"), frozenset({Colour.RED})), Colour.RED],
    ],
)
def test_what_is_plain_or_declared_travels(item: Any) -> None:
    back = loads(dumps(item))
    assert back == item
    assert type(back) is type(item)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int4", "bool", "complex64", "uint8"])
def test_arrays_travel_exactly(dtype: str) -> None:
    array = jnp.arange(6).reshape(2, 3).astype(dtype)
    on_the_host = np.asarray(array)
    turned = on_the_host.T.astype(on_the_host.dtype.newbyteorder(">"))
    back = loads(dumps({"x": [array, on_the_host, on_the_host[1, 2], jnp.zeros((0, 3), dtype), turned]}))["x"]
    assert isinstance(back[0], jax.Array)
    assert isinstance(back[1], np.ndarray)
    assert back[1].flags.writeable
    assert [b.dtype for b in back] == [array.dtype] * 5
    assert back.pop(3).shape == (0, 3)
    for found, expected in zip(back, [array, on_the_host, on_the_host[1, 2], turned], strict=True):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def test_keys_travel() -> None:
    keys = jax.random.split(jax.random.key(3, impl="rbg"), 2)
    back = loads(dumps(keys))
    assert back.dtype == keys.dtype
    np.testing.assert_array_equal(jax.random.key_data(back), jax.random.key_data(keys))


class Undeclared:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("code has been run",))


@pytest.mark.parametrize("item", [Undeclared(), print, int, np.array([Undeclared()], object), np.array(["a"]), 1j])
def test_nothing_else_is_sent(item: Any) -> None:
    with pytest.raises(TypeError, match="an object of the class .* can't be told to other workers"):
        dumps([item])


def message(header: Any, buffers: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<q", len(text)) + text + buffers


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Undeclared()),
        b"",
        message(["object", "os.system", "true"]),
        message(["enum", "tests.workers.test_codec.Colour", "BLUE"]),
        message(["named", "builtins", "print", 1]),
        message(["named", "tests.workers.test_codec", "Point", 1]),
        message(["array", "float32", [2], 0, 8], b"1234"),
        message(["array", "object", [1], 0, 8], b"12345678"),
        message(["array", "float32", [3], 0, 8], b"12345678"),
        message(["bytes", -4, 2], b"1234"),
        message(["bytes", 2, -1], b"1234"),
        message(["bytes", 1, 4], b"1234"),
        dumps([b"abc", b"defg"])[:-1],
        message(["nothing", 1]),
        message(["dict", 1]),
        message(["set", ["list", 1]]),
    ],
)
def test_what_comes_can_only_become_what_is_known(data: bytes) -> None:
    with pytest.raises(ValueError, match="this is not a message of a worker"):
        loads(data)


class OurOwnError(KeyError):
    pass


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyError("gone"), KeyError("gone")),
        (FileNotFoundError(2, "No such file", "x.txt"), FileNotFoundError(2, "No such file", "x.txt")),
        (replicax.errors.LocalityError("no"), replicax.errors.LocalityError("no")),
        (OurOwnError("gone"), replicax.errors.WorkerError("OurOwnError: 'gone'")),
        (ValueError(Undeclared), replicax.errors.WorkerError(f"ValueError: {Undeclared}")),
        (KeyboardInterrupt(), replicax.errors.WorkerError("KeyboardInterrupt")),
    ],
)
def test_errors_are_made_anew_or_become_a_named_one(error: BaseException, expected: Exception) -> None:
    name, text, _ = data = error_as_data(error)
    assert str(error_from_data(name, text, b"of another version")) == text
    back = error_from_data(*data)
    assert type(back) is type(expected)
    assert str(back) == str(expected)


def test_only_dataclasses_and_enums_are_declared() -> None:
    with pytest.raises(TypeError, match="Undeclared is neither a dataclass nor an enum"):
        declared(Undeclared)
