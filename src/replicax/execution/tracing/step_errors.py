"""Errors of steps, in the words of the step.

JAX's messages name the function that it has traced, which is Replicax's, and number its arguments. This module rewrites
them with the step's name, the user's line and the names of the arguments, and says what to write instead. The exception
stays the one that JAX raised; only its message changes.
"""

from __future__ import annotations

import contextlib
import inspect
import linecache
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from replicax import _jax
from replicax.devices.mesh import REPLICA_AXIS
from replicax.errors import PACKAGE, shown_line, users_frame_of
from replicax.execution.tracing.function_key import Wrapper
from replicax.user_functions import function_name
from replicax.variables.variable import Variable

_INSTEAD = {
    "bool": "Choose with jnp.where(condition, a, b) or jax.lax.cond(condition, f, g, x), and loop with "
    "jax.lax.while_loop or fori_loop.",
    "array": "Keep it an array: jax.numpy in place of numpy, no float(), int() or .item(); print with jax.debug.print, "
    "and return what you want to see.",
    "number": "A size, an index of a list and a range need a number that is known when the step is traced: take it "
    "from a shape, or capture it as a Python value; to repeat, jax.lax.fori_loop.",
    "mask": "Elements can't be left out, as shapes are fixed: choose with jnp.where(mask, x, 0).",
}
CAPTURED_IN = os.path.join(PACKAGE, "execution", "tracing", "capture.py")
"""Where the function is that JAX traces for a step; its arguments are called ``values``."""
_MESHES = {
    "array": "computes with an array from outside that lies on a mesh with explicit axes, as what is made inside of "
    "jax.set_mesh does. A step has a mesh of its own: pass the array in args, or close over np.asarray of it.",
    "mesh": "maps over a mesh, and there is none. A compiled step has that of its replica's logical devices "
    "(num_logical_devices=…); as plain Python, on the per-replica executor, a replica computes on its first device.",
    "other": "maps over devices itself, or lays an array on them (pmap, shard_map, in_shardings, a NamedSharding, "
    "with_sharding_constraint). A step is what one replica does with its own part of the batch: Replicax divides the "
    "batch and compiles the step. Call the mapped function directly, without pmap, shard_map or shardings, and combine "
    "values of all replicas with replicax.get_replica_context().all_reduce(…). For several devices in each replica see "
    "num_logical_devices.",
}
_VALUES = (
    "Pass variable.value; of a whole model, jax.tree.map(lambda x: x, model) is the same model with the values of its "
    "variables, as to jax.tree a variable is a pytree of its value."
)
_LEAVES = (
    "To jax.tree a variable is a pytree of its value, so jax.tree.leaves and jax.tree.map give arrays. Assign a whole "
    "pytree with replicax.assign(variables, values), or take the variables themselves: "
    "jax.tree.leaves(variables, is_leaf=lambda leaf: isinstance(leaf, replicax.Variable))."
)
_NUMBERS = (
    "Make it an array: jnp.asarray(number). Inside replicax.debug() and jax.disable_jit() loops of jax.lax are plain "
    "Python, and the counter of a fori_loop is such a number."
)
_NNX = (
    "Pass it as an argument: strategy.run(step, args=(model, optimizer, batch)). To replicax.train and run_steps, "
    "which pass the batch alone, give functools.partial(step, model, optimizer). A function that nnx.grad or the like "
    "transforms takes each object that it changes, by a batch norm or dropout, as an argument, too: the generator's "
    "loss takes the discriminator (nnx.value_and_grad(loss_fn)(generator, discriminator)), or uses nnx.clone(it)."
)


@contextlib.contextmanager
def explaining(
    fn: Callable[..., Any], paths: Callable[[], Sequence[str]], reads: Callable[[], Sequence[str]]
) -> Iterator[None]:
    """Rewrite the messages of JAX's errors in the step ``fn``, in the words of the step.

    ``paths`` are those of the traced arguments (``args[0]['x']``), ``reads`` the names of the variables read so far.
    """
    try:
        yield
    except Exception as error:
        text = _explanation(error, fn, paths, reads)
        if text is not None:
            error.args = (text, *error.args[1:])
        raise


def check_meshes(name: str, jaxpr: _jax.Jaxpr, mesh: Mesh) -> None:
    """Raise a ValueError if the traced step ``name`` uses another mesh than its strategy's."""
    equation = _jax.foreign_mesh(jaxpr, set(mesh.axis_names))
    if equation is not None:
        raise ValueError(f"step {name!r} at {_jax.source_line(equation)} {_MESHES['other']}")


def _explanation(
    error: Exception, fn: Callable[..., Any], paths: Callable[[], Sequence[str]], reads: Callable[[], Sequence[str]]
) -> str | None:
    """The new message; ``None`` to keep the old one."""
    said = str(error)
    if _jax.asked_for_an_array(error):
        return f"{where(error, fn)} gives an object to a function of jax.lax, which takes arrays. {_VALUES}\n{said}"
    if isinstance(error, AttributeError) and isinstance(error.obj, jax.Array) and hasattr(Variable, str(error.name)):
        return f"{where(error, fn)} asks an array for {error.name!r}, which variables have. {_LEAVES}\n{said}"
    if isinstance(error, AttributeError) and type(error.obj) in (int, float) and hasattr(jax.Array, str(error.name)):
        return f"{where(error, fn)} asks a Python number for {error.name!r}, which arrays have. {_NUMBERS}\n{said}"
    if isinstance(error, TypeError) and users_frame_of(error) is None:  # the step has not been entered
        if _gets_one_of_several(said, fn):
            return (
                f"{said}. An element of a dataset is one argument, also if it is a tuple. Take it apart in the step: "
                f"def {function_name(fn)}(batch): x, y = batch; strategy.run also takes its parts: args=batch."
            )
        if re.search(r"takes 1 positional argument but \d+ were given$", said) is not None:
            return (
                f"{said}. args is the tuple of the step's arguments: for one argument that is a tuple, "
                "args=(batch,), with a comma."
            )
    if "different trace level" in said:  # NNX's own words
        first = said.partition("\n")[0]
        return f"{where(error, fn)} changes an object of Flax NNX that is no argument. {_NNX}\nFlax says: {first}"
    missed = _jax.missed_a_mesh(error)
    if missed is not None:
        return f"{where(error, fn)} {_MESHES[missed]}\nJAX says: {said}"
    axis = _jax.unbound_axis(error)
    if axis is not None:
        return (
            f"{where(error, fn)} uses {f'the axis {axis!r}' if axis else 'an axis'}, and nothing maps over it there. "
            f"In compiled steps the axis of the replicas is called {REPLICA_AXIS!r}: "
            "jax.lax.pmean(x, replicax.REPLICA_AXIS). Collectives for both executors are those of "
            "replicax.get_replica_context(): all_reduce('mean', x), and replica_id_in_sync_group for "
            f"jax.lax.axis_index.\nJAX says: {said}"
        )
    kind = _jax.asked_for_a_value(error)
    if kind is None:
        return None
    arguments, said = _jax.arguments_named(said, CAPTURED_IN)
    return (
        f"{where(error, fn)} needs the value of something that {_depends_on(arguments, fn, paths, reads)}. No value "
        "is known there: the Python of a compiled step runs once, to record what is to be computed, for all replicas "
        f"and calls. {_INSTEAD[kind]} To look at values, run it as plain Python: with replicax.debug(): …\n"
        f"JAX says: {said}"
    )


def _gets_one_of_several(said: str, fn: Callable[..., Any]) -> bool:
    """Return whether Python misses arguments of the step, which takes several and was given one."""
    if "required positional argument" not in said:
        return False
    while isinstance(fn, Wrapper):
        fn = fn.fn
    first, *others = [p.name for p in _positional(fn) if p.default is p.empty] or [""]
    return bool(others) and all(repr(name) in said for name in others) and repr(first) not in said


def _positional(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters that a function takes by position; empty if it has no signature."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def where(error: Exception, fn: Callable[..., Any]) -> str:
    """The step, and the user's innermost line with its code: ``step 'train', in loss at model.py:12: …``."""
    name = function_name(fn)
    users = users_frame_of(error)
    if users is None:
        return f"step {name!r}"
    code, line = users[0].f_code, users[1]
    source = linecache.getline(code.co_filename, line).strip()
    inside = "" if code.co_name == name else f", in {code.co_name}"
    return f"step {name!r}{inside} at {shown_line(code.co_filename, line)}" + (f": `{source}`" if source else "")


def _depends_on(
    arguments: Sequence[int],
    fn: Callable[..., Any],
    paths: Callable[[], Sequence[str]],
    reads: Callable[[], Sequence[str]],
) -> str:
    """The arguments or variables that the value comes from, as far as JAX tells."""
    places = paths() if arguments else ()
    names = [as_written(places[n], fn) for n in arguments if n < len(places)]
    if names:
        return f"depends on the argument{'s' if len(names) > 1 else ''} {', '.join(names)}"
    variables = [repr(name) for name in reads()]
    if variables:
        shown = ", ".join(variables[:4]) + (", …" if len(variables) > 4 else "")
        return f"the step computes (it has read the variable{'s' if len(variables) > 1 else ''} {shown})"
    return "the step computes"


def as_written(path: str, fn: Callable[..., Any]) -> str:
    """The name of a part of an argument: ``batch['x']`` for ``args[0]['x']``, if ``fn`` calls its first ``batch``."""
    match = re.match(r"(?:args\[(\d+)\]|kwargs\['(\w+)'\])(.*)", path, re.DOTALL)
    if match is None:
        return path
    if match[2]:
        return match[2] + match[3]
    if isinstance(fn, Wrapper):
        return as_written(path, fn.fn) if fn.argument is None else fn.argument + match[3]
    number, positional = int(match[1]), _positional(fn)
    return positional[number].name + match[3] if number < len(positional) else path
