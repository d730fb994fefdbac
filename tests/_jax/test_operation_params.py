"""What the readers of parameters say of operations; and that they can read those of each of their families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from replicax import _jax
from replicax._jax import primitive_families as families, primitive_table
from replicax._jax.contractions import ConvolutionDimensions, convolution_dimensions
from replicax._jax.operation_params import (
    DotDimensions,
    LookupDimensions,
    dims_along,
    dot_dimensions,
    dropping,
    lookup_dimensions,
    moved_dims,
    reduced_along,
    untouched_dims,
)
from replicax._jax.primitive_table import primitives_named, primitives_with
from tests._jax.tiny_programs import PROGRAMS

X = jnp.ones((2, 3, 4))


def equations_in(program: _jax.Jaxpr) -> list[_jax.Equation]:
    inside = [inner for e in program.eqns for jaxpr in _jax.sub_jaxprs(e) for inner in equations_in(jaxpr)]
    return [*program.eqns, *inside]


def operation(fn: Callable[..., Any], *args: Any, among: frozenset[str]) -> _jax.Equation:
    """The last operation of a function that is in a family."""
    closed = jax.make_jaxpr(fn)(*args)
    *_, found = [e for e in equations_in(closed.jaxpr) if e.primitive.name in among]
    return found


REDUCTIONS, WINDOWED = (primitives_with("examples", word) for word in ("reduced", "windowed"))
ALONG_DIMS = frozenset().union(*(primitives_with("examples", word) for word in ("along", "sorted", "reversed")))
UNSTACKS, LOOKUPS = map(primitives_named, ("unstack", "gather"))
READERS: dict[str, tuple[frozenset[str], Callable[[_jax.Equation], Any]]] = {
    "dims_along": (
        ALONG_DIMS | REDUCTIONS | families.SQUEEZES | UNSTACKS | families.IOTAS,
        lambda e: dims_along(e.params, 1),
    ),
    "dims_along a result's": (families.STACKS, lambda e: dims_along(e.params, 2)),
    "moved_dims": (families.DIM_MOVES, lambda e: moved_dims(e.params)),
    "untouched_dims": (WINDOWED, lambda e: untouched_dims(e.params)),
    "dot_dimensions": (families.MATRIX_PRODUCTS, lambda e: dot_dimensions(e.params)),
    "convolution_dimensions": (families.CONVOLUTIONS, lambda e: convolution_dimensions(e.params)),
    "lookup_dimensions": (
        LOOKUPS | families.SCATTERS,
        lambda e: lookup_dimensions(e.params, e.invars[0].aval.ndim),
    ),
    "dropping": (families.SCATTERS, lambda e: dropping(e.params)),
}
INSTALLED = primitive_table.parameters().keys()
CASES = [(reader, name) for reader, (family, _) in READERS.items() for name in sorted(family & INSTALLED)]


@pytest.mark.parametrize(("reader", "name"), CASES)
def test_a_reader_reads_all_of_its_family(reader: str, name: str) -> None:
    found = READERS[reader][1](operation(PROGRAMS[name], among=frozenset({name})))
    assert found is not None or reader == "dropping"


ALONG = {
    "a sum": (lambda: lax.reduce(X, 0.0, lax.add, (0, 2)), (0, 2)),
    "the largest": (lambda: jnp.argmax(X, axis=1), (1,)),
    "another reduction": (lambda: lax.reduce(X, 1.0, lambda a, b: a * b + a, (1,)), (1,)),
    "a sum so far": (lambda: jnp.cumsum(X, axis=-1), (2,)),
    "a sort": (lambda: lax.sort(X, dimension=1), (1,)),
    "turned round": (lambda: lax.rev(X, (0, 1)), (0, 1)),
    "joined, by a number of NumPy's": (lambda: lax.concatenate([X, X], np.int64(1)), (1,)),
    "a transform": (lambda: jnp.fft.fft2(X), (1, 2)),
    "the first few": (lambda: lax.top_k(X, 2), (2,)),
    "without a dim": (lambda: lax.squeeze(X[:, :1], (1,)), (1,)),
}


@pytest.mark.parametrize("name", ALONG)
def test_the_dims_that_an_operation_goes_along(name: str) -> None:
    fn, expected = ALONG[name]
    among = ALONG_DIMS | REDUCTIONS | families.SQUEEZES
    assert dims_along(operation(fn, among=among).params, 3) == expected


def test_a_reduction_of_other_dims() -> None:
    found = operation(lambda x: x.max((0, 1)), X, among=REDUCTIONS)
    [largest] = _jax.bind(found, [X], reduced_along(found.params, [2]))
    assert largest.shape == (2, 3)


def test_where_dims_are_moved() -> None:
    turned = operation(lambda x: x.transpose(1, 2, 0), X, among=families.DIM_MOVES)
    assert list(moved_dims(turned.params)) == [2, 0, 1]
    spread = operation(lambda x: lax.broadcast_in_dim(x, (2, 5, 3, 4), (0, 2, 3)), X, among=families.DIM_MOVES)
    assert list(moved_dims(spread.params)) == [0, 2, 3]


UNTOUCHED = {
    "padded": (lambda: lax.pad(X, 0.0, [(0, 0, 0), (1, -1, 0), (0, 0, 1)]), [0]),
    "windows": (lambda: lax.reduce_window(X, 0.0, lax.add, (1, 2, 1), (1, 1, 1), "VALID"), [0, 2]),
    "strides": (lambda: lax.reduce_window(X, 0.0, lax.add, (1, 1, 1), (2, 1, 1), "VALID"), [1, 2]),
    "filled": (lambda: lax.reduce_window(X, 0.0, lax.add, (1, 1, 1), (1, 1, 1), ((0, 0), (1, 0), (0, 0))), [0, 2]),
}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_dims_that_are_left_alone(name: str) -> None:
    fn, expected = UNTOUCHED[name]
    assert untouched_dims(operation(fn, among=WINDOWED).params) == expected


def test_the_dims_of_a_product() -> None:
    found = operation(lambda x, y: jnp.einsum("bij,bkj->bik", x, y), X, X, among=families.MATRIX_PRODUCTS)
    assert dot_dimensions(found.params) == DotDimensions(((2,), (2,)), ((0,), (0,)))


def test_the_dims_of_a_convolution() -> None:
    def convolved(x: Any, w: Any) -> Any:
        numbers = ("NHWC", "HWIO", "CNHW")
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=2)

    found = operation(convolved, jnp.ones((5, 4, 4, 6)), jnp.ones((3, 3, 3, 8)), among=families.CONVOLUTIONS)
    assert convolution_dimensions(found.params) == ConvolutionDimensions(
        examples=0, channels=3, filter_inputs=2, filter_outputs=3, result_examples=1, example_groups=1, channel_groups=2
    )


def test_the_dims_of_lookups() -> None:
    rows = operation(lambda x: x[jnp.array([1, 0, 1])], X, among=LOOKUPS)
    assert lookup_dimensions(rows.params, 3) == LookupDimensions((0,), {}, {1: 1, 2: 2})
    own = operation(jax.vmap(lambda x, i: x[i]), X, jnp.array([1, 0]), among=LOOKUPS)
    assert lookup_dimensions(own.params, 3) == LookupDimensions((1, 2), {0: 0}, {1: 1, 2: 2})
    added = operation(lambda x: x.at[jnp.array([1])].add(1.0), X, among=families.SCATTERS)
    assert lookup_dimensions(added.params, 3) == LookupDimensions((0,), {}, {1: 1, 2: 2})


@pytest.mark.parametrize(("mode", "drops"), [("drop", True), ("promise_in_bounds", True), ("clip", False)])
def test_a_scatter_that_drops_what_is_outside(mode: Any, drops: bool) -> None:
    found = operation(lambda x: x.at[jnp.array([7])].set(5.0, mode=mode), X, among=families.SCATTERS)
    params = dropping(found.params)
    assert (params is not None) == drops
    if params is not None:
        indices, updates = jnp.array([[7]]), jnp.full((1, 3, 4), 5.0)
        [unchanged] = _jax.bind(found, [X, indices, updates], params)
        np.testing.assert_array_equal(unchanged, X)


def test_families_with_rules_of_their_own_have_nothing_in_common() -> None:
    assert families.by_primitive({families.SCANS: 1, families.BRANCHES: 2}) == {"scan": 1, "cond": 2}
    with pytest.raises(ValueError, match="must not have primitives in common"):
        families.by_primitive({families.DIM_MOVES: 1, families.BROADCASTS: 2})
