"""The messages for changes of NNX objects that can't leave a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

ITS_OWN = (
    "{}, of an NNX object, was changed to a value that differs between replicas, and a step leaves one value for all "
    "of them. Reduce it first: replicax.get_replica_context().all_reduce('mean', value). If each replica is to keep "
    "its own, as a cache of nnx.MultiHeadAttention, pass own = nnx.state(model, nnx.Cache) to the step; there, "
    "graphdef, _, rest = nnx.split(model, nnx.Cache, ...), compute with copy = nnx.merge(graphdef, own, rest, "
    "copy=True), and return nnx.state(copy, nnx.Cache)"
)


def structural(before: Any, after: Any, names: Sequence[str], names_now: Sequence[str]) -> str:
    """The error message for a step that has changed more than values."""
    added, gone = sorted(set(names_now) - set(names)), sorted(set(names) - set(names_now))
    what = [*(f"{name} is new" for name in added), *(f"{name} is gone" for name in gone)]
    if not what:
        attributes = _attributes(before, after)
        if attributes and attributes.keys() <= _MODES:
            return (
                "the step has called train() or eval() of an NNX object, which sets "
                f"{', '.join(sorted(attributes))}: only values of nnx.Variables can leave a step. Call model.eval() "
                "before strategy.run(…), and model.train() after it. Or compute in the step with a view of the model, "
                "nnx.view(model, deterministic=True, use_running_average=True), which leaves the model as it is"
            )
        what = [f"the attribute {name!r} {change}" for name, change in attributes.items()]
        what = what or ["an attribute, or the class of a part"]
    return (
        f"the step has changed the structure of an NNX object: {'; '.join(what)}. Values of nnx.Variables can leave a "
        "step, other changes can't: make them before (model.train(), model.eval(), nnx.view), take away with nnx.pop "
        "what the model sows, and return what you want to see"
    )


_MODES = {"deterministic", "use_running_average"}
"""The attributes that ``nnx.Module.train`` and ``nnx.Module.eval`` set in layers that have them."""


def _attributes(before: Any, after: Any) -> dict[str, str]:
    """The attributes that have changed, each with both values."""
    return {
        str(name): f"was {getattr(old, 'value', old)!r}, now {getattr(new, 'value', new)!r}"
        for (name, old), (other, new) in zip(before.attributes, after.attributes, strict=False)
        if name == other and old != new
    }
