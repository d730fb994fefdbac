"""Primitives of our own, that go through every transformation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters import ad as _ad, batching as _batching, mlir as _mlir, partial_eval as _pe

from replicax._jax.jaxprs.types import Primitive, ShapedArray
from replicax._jax.traces import outside_tracing

computed_by_python: set[Primitive] = set()
"""Primitives of ours that no program can be compiled with."""


def identity_primitive(name: str, *, of_tangents: bool | Primitive = False) -> Primitive:
    """A primitive that returns its operands as they are, and survives every transformation.

    Differentiation keeps it on the primal values, as does batching; in compiled code it is nothing at all. It is about
    its first operand: operands that are computed at another time than that one go without it. With ``of_tangents`` it
    is on tangents, too; or a linear primitive, if that is given, is there instead. It never is on cotangents.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *xs, **_: list(xs))
    primitive.def_abstract_eval(lambda *avals, **_: list(avals))
    _mlir.register_lowering(primitive, lambda _ctx, *xs, **_: xs)
    _batching.primitive_batchers[primitive] = lambda args, dims, **params: (primitive.bind(*args, **params), dims)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        theirs = primitive if of_tangents is True else of_tangents
        moved = _of_nonzero(theirs, tangents, params) if theirs else list(tangents)
        return primitive.bind(*primals, **params), moved

    def partly(trace: Any, *tracers: Any, **params: Any) -> list[Any]:
        together = [i for i, t in enumerate(tracers) if t.is_known() == tracers[0].is_known()]
        results = [t.pval.get_known() if t.is_known() else t for t in tracers]
        return _bound_of(trace, primitive, tracers, together, params, results)

    _ad.primitive_jvps[primitive] = jvp
    _ad.primitive_transposes[primitive] = lambda cotangents, *_, **params: list(cotangents)
    _pe.custom_partial_eval_rules[primitive] = partly
    return primitive


def collective_primitive(name: str, compute: Callable[..., list[Any]], *, is_compiled: bool = True) -> Primitive:
    """A linear primitive that is its own transpose, operand by operand, such as a sum over replicas.

    ``compute(*arrays, **params)`` returns a list of its values, and stands for it in compiled code. With
    ``is_compiled=False`` only Python computes it; then zeros are operands as others are, as another replica's may be no
    zero.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *avals, **_: list(avals))
    bound = _of_nonzero
    if is_compiled:
        primitive.def_impl(compute)
        _mlir.register_lowering(primitive, _mlir.lower_fun(compute, multiple_results=True))
    else:
        computed_by_python.add(primitive)
        primitive.def_impl(outside_tracing()(compute))

        def bound(primitive: Primitive, values: Sequence[Any], params: Any) -> list[Any]:
            return _of_nonzero(primitive, [_instantiated(v) for v in values], params)

    _batching.primitive_batchers[primitive] = lambda args, dims, **params: (primitive.bind(*args, **params), dims)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        return primitive.bind(*primals, **params), bound(primitive, tangents, params)

    def partly(trace: Any, *tracers: Any, **params: Any) -> list[Any]:
        # A custom rule may reduce values and tangents together, of which only the values are known at first.
        results: list[Any] = [None] * len(tracers)
        for known in (True, False):
            together = [i for i, t in enumerate(tracers) if t.is_known() is known]
            results = _bound_of(trace, primitive, tracers, together, params, results)
        return results

    _ad.primitive_jvps[primitive] = jvp
    _ad.primitive_transposes[primitive] = lambda cotangents, *_, **params: bound(primitive, cotangents, params)
    _pe.custom_partial_eval_rules[primitive] = partly
    return primitive


def _instantiated(value: Any) -> Any:
    """A tangent or cotangent as an array, if it is one of a float."""
    return _ad.instantiate_zeros(value) if value.aval.dtype != jax.dtypes.float0 else value


def _of_nonzero(primitive: Primitive, values: Sequence[Any], params: Any) -> list[Any]:
    """``primitive`` of the tangents or cotangents that are not known to be zero."""
    present = [i for i, v in enumerate(values) if not isinstance(v, _ad.Zero)]
    results = list(values)
    for i, result in zip(present, primitive.bind(*(values[i] for i in present), **params), strict=True):
        results[i] = result
    return results


def _bound_of(
    trace: Any, primitive: Primitive, tracers: Sequence[Any], chosen: Sequence[int], params: Any, results: list[Any]
) -> list[Any]:
    """``results``, with those of ``primitive`` of some operands in their places, while it is partly evaluated."""
    if chosen:
        computed = trace.default_process_primitive(primitive, [tracers[i] for i in chosen], params)
        for i, result in zip(chosen, computed, strict=True):
            results[i] = result
    return results


def asking_primitive(name: str, answer: Callable[..., Any]) -> Primitive:
    """A primitive of one operand, whose result is a bool that is known before the program is compiled.

    ``answer(x, **params)`` returns it; in compiled code it is a constant.
    """
    primitive = Primitive(name)
    primitive.def_impl(answer)
    primitive.def_abstract_eval(lambda x, **_: ShapedArray((), jax.numpy.bool_))
    _mlir.register_lowering(primitive, _mlir.lower_fun(answer, multiple_results=False))

    def batched(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        # Last, so that the other dims keep their numbers.
        return primitive.bind(jax.numpy.moveaxis(args[0], dims[0], -1), **params), None

    _batching.primitive_batchers[primitive] = batched
    return primitive


def composite_primitive(name: str, compute: Callable[..., list[Any]]) -> Primitive:
    """A primitive that stands for several operations, for passes that know a better way to do them; not differentiable.

    ``compute(*arrays, **params)`` returns a list of its values, and stands for it in compiled code.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(compute)

    def shapes(*avals: Any, **params: Any) -> list[ShapedArray]:
        operands = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        return [ShapedArray(x.shape, x.dtype) for x in jax.eval_shape(functools.partial(compute, **params), *operands)]

    primitive.def_abstract_eval(shapes)
    _mlir.register_lowering(primitive, _mlir.lower_fun(compute, multiple_results=True))
    return primitive


def two_way_primitive(name: str) -> Primitive:
    """An identity on one array whose transpose is itself with ``back`` negated, and its other params."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x, **_: x)
    primitive.def_abstract_eval(lambda aval, **_: aval)
    _mlir.register_lowering(primitive, lambda _ctx, x, **_: [x])
    _batching.defvectorized(primitive)

    def transpose(cotangent: Any, _x: Any, *, back: bool, **params: Any) -> list[Any]:
        return [primitive.bind(cotangent, back=not back, **params)]

    _ad.deflinear2(primitive, transpose)
    return primitive


def resized(aval: Any, axis: int, size: int) -> Any:
    """``aval`` with another size along ``axis``."""
    return aval.update(shape=(*aval.shape[:axis], size, *aval.shape[axis + 1 :]))


def linear_primitive(
    name: str, compute: Callable[..., Any], shape: Callable[..., Any], transpose: Callable[..., Any]
) -> Primitive:
    """A linear primitive of one operand that Python computes, never compiled; ``axis`` is one of its params.

    ``compute(x, **params)`` returns its value, ``shape(aval, **params)`` its abstract value, and
    ``transpose(cotangent, aval, **params)`` its transpose.
    """
    primitive = Primitive(name)
    computed_by_python.add(primitive)
    primitive.def_impl(outside_tracing()(compute))
    primitive.def_abstract_eval(shape)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        return primitive.bind(*primals, **params), primitive.bind(_ad.instantiate_zeros(tangents[0]), **params)

    def transposed(cotangent: Any, x: Any, **params: Any) -> tuple[Any]:
        return (transpose(_ad.instantiate_zeros(cotangent), x.aval, **params),)

    def batched(args: Sequence[Any], dims: Sequence[Any], *, axis: int, **params: Any) -> tuple[Any, int]:
        x = jax.numpy.moveaxis(args[0], dims[0], 0)
        return primitive.bind(x, axis=axis + 1, **params), 0

    _ad.primitive_jvps[primitive] = jvp
    _ad.primitive_transposes[primitive] = transposed
    _batching.primitive_batchers[primitive] = batched
    return primitive
