"""``map``: items on the towers in turn."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from replicax.compat import v1 as tf
from tests.compat.executors import Executor, entered, on_both, two_towers


@on_both
@pytest.mark.parametrize("count", [1, 2])
def test_map(executor: Executor, count: int) -> None:
    d = tf.MirroredStrategy([f"cpu:{i}" for i in range(count)])
    with entered(d, executor):
        found = d.map([1.0, 2.0, 4.0], lambda x, factor, plus: x * factor + plus, 10.0, plus=1.0)
        assert [[float(x) for x in own] for own in d.unwrap(found)] == [[[11, 21, 41]], [[11, 41], [21]]][count - 1]
        combined = [float(d.reduce(how, found)) for how in ("sum", "mean", "only_first_tower")]
        np.testing.assert_allclose(combined, [73, 73 / 3, 11], rtol=1e-6)  # the mean is over items
        assert repr(found) == f"MapOutput(3 items on {count} towers)"
        assert isinstance(found, tf.PerDevice)
        assert not isinstance(found, tf.Mirrored)
        assert d.value_container(d.unwrap(found)[0]) is found
        assert d.group(found) is None
        with pytest.raises(ValueError, match="the output of map over nothing"):
            d.reduce("sum", d.map([], lambda x: x))


@on_both
def test_outputs_that_are_no_arrays(executor: Executor) -> None:
    d = two_towers()
    with entered(d, executor):
        assert float(d.reduce("mean", d.map([1.0, 2.0, 3.0], lambda item: 5.0))) == 5.0
        assert d.reduce("mean", d.map([1.0, 2.0, 3.0], lambda item: None)) is None
        found = d.reduce("sum", d.map([1.0, 2.0, 3.0], lambda item: {"count": 1, "item": item + 0}))
        assert (int(found["count"]), float(found["item"])) == (3, 6.0)


@on_both
def test_map_in_a_merge_fn(executor: Executor) -> None:
    d = two_towers()

    def merge_fn(distribution: Any, x: Any) -> Any:
        total = distribution.reduce("sum", x)
        return distribution.reduce("mean", distribution.map([1.0, 2.0, 6.0], lambda item: item * total))

    with entered(d, executor):
        result = d.call_for_each_tower(lambda x: tf.get_tower_context().merge_call(merge_fn, x + 0), 5.0)
        assert float(result) == 30


@on_both
def test_what_map_returns_is_reduced_first(executor: Executor) -> None:
    """It is no single value, and no array; the errors say so as they do of any PerDevice value."""
    d = two_towers()
    with entered(d, executor):
        v = tf.get_variable("v", initializer=1.0)
        found = d.map([1.0, 2.0, 3.0], lambda item: item)
        with pytest.raises(ValueError, match=r"distribution\.fetch: a PerDevice value has no single value"):
            d.fetch(found)
        with pytest.raises(TypeError, match=r"distribution\.broadcast: the value is MapOutput\(3 items on 2 t"):
            d.broadcast(found)
        with pytest.raises(TypeError, match=r"distribution\.update: args\[0\] is MapOutput"):
            d.update(v, lambda v, x: v.assign(x), found)
        with pytest.raises(TypeError, match=r"distribution\.map: args\[0\] is PerDevice"):
            d.map([1.0], lambda item, x: item * x, d.worker_device_index)
        [by_batch, (at_v, of_index)] = (
            d.batch_reduce("sum", [(found, v)]),
            d.batch_reduce("mean", [(found, v), (d.worker_device_index, v)]),
        )
        assert (float(by_batch[0]), float(at_v), float(of_index)) == (6.0, 2.0, 0.5)
        assert float(d.fetch(d.reduce("sum", found))) == 6.0
        with pytest.raises(
            TypeError, match=r"distribution.reduce: the output of map for item 0 is 'a', and not an array"
        ):
            d.reduce("sum", d.map([1, 2], lambda item: "ab"[0]))


@on_both
def test_map_in_a_merge_fn_takes_what_is_the_same_for_all(executor: Executor) -> None:
    d = two_towers()

    def merge_fn(distribution: Any, x: Any) -> Any:
        return distribution.reduce("sum", distribution.map([1.0], lambda item, x: item * x, x))

    def fn(x: Any) -> Any:
        return tf.get_tower_context().merge_call(merge_fn, jnp.float32(x) + 0)

    with entered(d, executor):
        assert float(d.call_for_each_tower(fn, 3.0)) == 3.0  # as is inferred
        with pytest.raises(ValueError, match=r"distribution\.map: args\[0\] differs between towers: reduce it first"):
            d.call_for_each_tower(fn, d.worker_device_index)
