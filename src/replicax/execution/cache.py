"""The programs of a strategy, so that each step is traced once."""

from __future__ import annotations

import collections
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from replicax import _jax
from replicax.errors import PACKAGE, LocalityWarning, RetraceWarning, few, shortened, warn
from replicax.execution.compiled.replicate import Executable
from replicax.execution.replica_values import ARRAYS
from replicax.execution.tracing.arguments import describe_difference, in_words, now_per_replica
from replicax.execution.tracing.function_key import FunctionKey, Wrapper, any_dead, function_key
from replicax.execution.tracing.step_errors import as_written
from replicax.locality import T
from replicax.variables.collection import VariableCollection
from replicax.variables.slots import Slot
from replicax.variables.variable import Variable

_MODELS = os.path.join(PACKAGE, "models", "")
_CAPACITY = 256
_CAPTURES = 16
_WARN_AT = 10


class ProgramCache:
    """Executables by key: the function, the arguments' structure, shapes, dtypes and localities, JAX's settings.

    The least recently used go when there are more than 256, or more than 16 that differ only in what their function
    captures (a learning rate, say), or are of one function that was defined anew, as by edits of a notebook's cell;
    those whose function or variables are gone go first. When one function is traced again for the tenth time, a warning
    says which part of its key changed.
    """

    def __init__(self, variables: VariableCollection) -> None:
        self.variables = variables
        self.replicas = variables.replicas
        self._entries: collections.OrderedDict[Any, tuple[Any, Executable]] = collections.OrderedDict()
        self._users: weakref.WeakKeyDictionary[Slot, set[Any]] = weakref.WeakKeyDictionary()
        self._traces: collections.Counter[Any] = collections.Counter()
        self._last: dict[Any, Any] = {}
        self._created: dict[FunctionKey, list[Variable]] = {}
        self._refused: collections.OrderedDict[Any, str] = collections.OrderedDict()
        # The last result of `find`: a loop asks for it again, and comparing keys costs less than hashing one.
        self._latest: tuple[Any, Executable | None] = (None, None)

    def find(self, key: Any) -> Executable | None:
        """The executable with this key, if there is one."""
        latest_key, latest = self._latest
        if key == latest_key:
            return latest
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(entry[0])
            self._latest = entry
            return entry[1]
        return None

    def add(self, key: Any, executable: Executable, fn: Callable[..., Any]) -> None:
        """Keep the ``executable`` of ``fn``; warn if that is traced again and again."""
        for other in [k for k in self._entries if k[0].is_dead or any_dead(k[1])]:
            self._drop(other)
        while len(self._entries) >= _CAPACITY:
            self._drop(next(iter(self._entries)))
        alike = [k for k in self._entries if k[1:] == key[1:] and _are_versions(k[0], key[0])]
        for other in alike[: 1 - _CAPTURES]:
            self._drop(other)
        for slot in _slots(executable):
            self._users.setdefault(slot, set()).add(key)
            slot.caches.add(self)
        self._entries[key] = key, executable  # last: an interrupt before it leaves no program that can't be forgotten
        code = key[0].code
        self._traces[code] += 1
        if self._traces[code] == _WARN_AT + 1 and not _is_ours(code):
            changed = "; ".join(_difference(self._last[code], key))
            warn(
                f"{executable.program.name} has been traced {self._traces[code]} times, each for a new program. What "
                f"changed last is {changed}. Pass what changes from call to call as an array, keep its shape, and make "
                "objects, such as models and metrics, once, before the loop.",
                RetraceWarning,
            )
        if code in self._last and not _is_ours(code):
            self._warn_of_own_models(self._last[code], key, fn)
        self._last[code] = key

    def _warn_of_own_models(self, last: Any, key: Any, fn: Callable[..., Any]) -> None:
        """Warn if arguments that were mirrored in the last call are now per replica, as the step returned them."""
        _, before = self._entries.get(last, (None, None))
        changed = now_per_replica(last[1], key[1])
        if before is None or not changed or not before.program.has_derivatives:
            return
        outputs: Any = [v.aval for v in before.program.jaxpr.outvars[len(before.program.writes) :]]
        own = {(x.shape, x.dtype) for x, locality in zip(outputs, before.localities, strict=True) if locality is T}
        if not own.issuperset(type_ for _, type_ in changed):
            return
        several = len(changed) > 1
        warn(
            f"step {before.program.name!r}: the argument{'s' if several else ''} "
            f"{few([as_written(path, fn) for path, _ in changed])} {'were' if several else 'was'} the same on all "
            f"{self.replicas.num_replicas} replicas in the last call. In this call each replica has its own, which the "
            "step returned: each replica trains a model of its own. Reduce the gradients in the step: grads = "
            "replicax.get_replica_context().all_reduce('mean', grads). (If each replica is to have its own model, "
            "begin with state that is per replica: strategy.distribute_values_from_function(lambda ctx: state).)",
            LocalityWarning,
        )

    def refuse(self, key: Any, why: str) -> None:
        """Remember that no program can be made for ``key``; forgotten like programs."""
        for other in [k for k in self._refused if k[0].is_dead]:
            del self._refused[other]
        while len(self._refused) >= _CAPACITY:
            self._refused.popitem(last=False)
        self._refused[key] = why

    def why_refused(self, key: Any) -> str | None:
        """Why no program can be made for ``key``, if that has been tried."""
        return self._refused.get(key)

    def forget(self, slot: Slot) -> None:
        """The variable of ``slot`` is gone: programs that use it can never run again."""
        for key in list(self._users.pop(slot, ())):
            self._drop(key)

    def _drop(self, key: Any) -> None:
        self._latest = None, None
        _, executable = self._entries.pop(key, (None, None))
        for slot in _slots(executable) if executable is not None else ():
            self._users.get(slot, set()).discard(key)

    def created_by(self, fn: Callable[..., Any], key: FunctionKey) -> list[Variable]:
        """The variables that this function has created before, or else another with the same key."""
        for dead in [k for k in self._created if k.is_dead]:
            del self._created[dead]
        return next((self._created[k] for k in (_without_numbers(fn, key), key) if k in self._created), [])

    def keep_created(self, variables: list[Variable], fn: Callable[..., Any], key: FunctionKey) -> None:
        """Let the step find those that it has created; it may have another key after tracing."""
        for k in (_without_numbers(fn, key), key) if variables else ():
            self._created.setdefault(k, variables)

    def trace_count(self, fn: Callable[..., Any]) -> int:
        """The number of times that ``fn`` (or another function with the same code) has been traced."""
        return self._traces[function_key(fn).code]


def _are_versions(old: FunctionKey, new: FunctionKey) -> bool:
    """Whether two functions differ in what they capture only, or may be a definition before and after an edit."""
    name = getattr(new.code, "co_qualname", None)
    return bool(old.code == new.code or (old.is_redefined and old.code.co_qualname == name))


def _is_ours(code: Any) -> bool:
    """Whether a step is one of Replicax's own, such as that of ``reduce``, which may meet any number of shapes.

    The steps that adapters make of other libraries' models count as the user's.
    """
    file = getattr(code, "co_filename", "")
    return file.startswith(PACKAGE) and not file.startswith(_MODELS)


def _without_numbers(fn: Any, key: FunctionKey) -> FunctionKey:
    """The key of one function object, whatever numbers, strings and arrays it captures."""
    while isinstance(fn, Wrapper):
        fn = fn.fn
    function = _jax.ById(getattr(fn, "__func__", fn))  # a method is another object each time
    bound = [part for part in key.captured if part[0] == "self"]  # numbers of a frozen object tell it from others
    return FunctionKey(function, (*_parts_but_numbers((key.code, key.captured)), *bound), {})


def _parts_but_numbers(key: Any) -> Iterator[Any]:
    """The parts of a key that are no such values: code, the types of containers, other objects."""
    if not isinstance(key, tuple):
        if not (isinstance(key, _jax.ById) and isinstance(key.value, ARRAYS)):
            yield key
    elif len(key) != 2 or key[0] not in _jax.BY_VALUE:
        for part in key:
            yield from _parts_but_numbers(part)


def _slots(executable: Executable) -> set[Slot]:
    return {*executable.donated, *executable.kept, *executable.written}


def _difference(old: Any, new: Any) -> list[str]:
    old_fn: FunctionKey = old[0]
    new_fn: FunctionKey = new[0]
    was = dict(old_fn.captured)
    changes = [
        f"the captured value {name!r}: {in_words(_shown(was.get(name)), _shown(value))}"
        for name, value in new_fn.captured
        if was.get(name) != value
    ]
    changes += describe_difference(old[1], new[1])
    if old[2] != new[2]:
        changes.append("JAX's settings (such as jax_enable_x64 or the default precision)")
    return changes or ["nothing that Replicax can name"]


def _shown(frozen: Any) -> str:
    if isinstance(frozen, tuple) and len(frozen) == 2 and isinstance(frozen[0], type):
        frozen = frozen[1]
    return shortened(repr(frozen))
