"""The public API has everything that the documents name, with the signatures that they give it."""

from __future__ import annotations

import inspect
import re
import types
from typing import Any

import pytest

import replicax
from replicax.compat import v1
from tests.compat import documents
from tests.compat.documents import Document, Method, Parameter

DOCUMENTS = documents.documents()


def api_of(document: Document) -> Any:
    """The module that has the names of a document's generation."""
    return v1 if document.is_first_generation else replicax


def every_method() -> list[Any]:
    return [
        pytest.param(document, name, id=f"{file[:3]}-{document.name}.{name}")
        for file, document in DOCUMENTS.items()
        for name in document.methods
    ]


each_document = pytest.mark.parametrize("document", DOCUMENTS.values(), ids=[file[:3] for file in DOCUMENTS])


# --- the parser -----------------------------------------------------------------------------------------


def test_the_table_is_what_the_documents_say() -> None:
    """Where they are not at hand, it is at least a table as the parser writes it."""
    assert documents.to_table(DOCUMENTS) == documents.TABLE.read_text()


# --- names ----------------------------------------------------------------------------------------------


@each_document
def test_the_class_is_there_with_its_base(document: Document) -> None:
    api = api_of(document)
    assert document.name in api.__all__
    if document.inherits is not None:
        assert issubclass(getattr(api, document.name), getattr(api, document.inherits))


@each_document
def test_the_properties_are_there(document: Document) -> None:
    kind = getattr(api_of(document), document.name)
    # Of TPUs, the resolver and the number of steps come first; on a machine without any it has to be given.
    resolver = replicax.TPUClusterResolver(emulate="2x2x1x2")
    arguments = (resolver, 1) if required(kind) else (resolver,) if document.name == "TPUStrategy" else ()
    distribution = kind(*arguments)
    for name in document.properties:
        assert getattr(distribution, name) is not None, name
        assert not callable(getattr(distribution, name)), name


def required(function: Any) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]


@each_document
def test_the_other_names_are_there(document: Document) -> None:
    """Or, where the modern API has another name for a thing, asking for the old one says which."""
    api = api_of(document)
    missing = {name for name in document.names if name not in api.__all__}
    assert missing == (set() if document.is_first_generation else {"DistributedValues", "initialize_tpu_system"})
    for name in missing:
        with pytest.raises(AttributeError, match=re.escape(f"here it is {RENAMED[name]}")):
            getattr(api, name)


@each_document
def test_their_members_are_there(document: Document) -> None:
    api = api_of(document)
    missing = [
        f"{kind}.{name}"
        for kind, names in document.members.items()
        for name in names
        if not (hasattr(getattr(api, kind), name) or name in _attributes_of(getattr(api, kind)))
    ]
    assert missing == ([] if document.is_first_generation else ["Strategy.experimental_run"])
    for name in (each.partition(".")[2] for each in missing):
        with pytest.raises(AttributeError, match=re.escape(f"here it is {RENAMED[name]}")):
            getattr(replicax.get_strategy(), name)


RENAMED = {
    "DistributedValues": "replicax.PerReplica",
    "initialize_tpu_system": "nothing to do: JAX initializes the devices",
    "experimental_run": "strategy.run(fn, args=(next(iterator),))",
}
"""All that the documents name and Replicax calls otherwise, and what it says of these."""


def test_what_they_are_called_today_is_there() -> None:
    assert "PerReplica" in replicax.__all__
    assert callable(replicax.Strategy.run)


def _attributes_of(kind: type) -> set[str]:
    """The attributes that objects have from the start, as their class declares or documents them."""
    declared = {name for each in kind.__mro__ for name in inspect.get_annotations(each)}
    return declared | set(re.findall(r"^ *(\w+): ", inspect.getdoc(kind) or "", re.M))


@each_document
def test_each_way_to_combine_values_is_taken(document: Document) -> None:
    distribution = v1.MirroredStrategy(["cpu:0", "cpu:1"])
    with distribution.scope():
        value = distribution.worker_device_index
        for name in document.aggregations:
            how = v1.VariableAggregation[name] if name.isupper() else name
            expected = {"sum": 1, "mean": 0.5, "only_first_tower": 0}[name.lower()]
            assert float(distribution.reduce(how, value)) == expected


# --- signatures -----------------------------------------------------------------------------------------


def refused(method: Method, function: Any) -> list[str]:
    """In what a call that the documents allow would not be taken, or be taken otherwise."""
    ours = list(inspect.signature(function).parameters.values())
    others = getattr(function, "also_named", {})
    problems = []
    if ours and ours[0].name == "self":
        ours = ours[1:]
    named = [p for p in ours if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]
    theirs = [p for p in method.parameters if not p.kind]
    for i, parameter in enumerate(theirs):
        if i >= len(named):
            problems.append(f"there is no {parameter.name}")
        elif parameter.name not in (named[i].name, *(new for new, old in others.items() if old == named[i].name)):
            problems.append(f"{parameter.name} is called {named[i].name}")
        elif named[i].kind is named[i].POSITIONAL_ONLY:
            problems.append(f"{parameter.name} is positional only")
        else:
            problems += _other_default(parameter, named[i])
    problems += [f"{p.name} is required" for p in named[len(theirs) :] if p.default is p.empty]
    problems += [f"{p.name} is required" for p in ours if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    for parameter in method.parameters:
        kind = {"*": inspect.Parameter.VAR_POSITIONAL, "**": inspect.Parameter.VAR_KEYWORD}.get(parameter.kind)
        if kind is not None and not any(p.kind is kind and p.name == parameter.name for p in ours):
            problems.append(f"there is no {parameter.kind}{parameter.name}")
    return problems


def _other_default(theirs: Parameter, ours: inspect.Parameter) -> list[str]:
    if theirs.default is None:
        return []  # required there, it may be optional here
    expected = eval(theirs.default)
    if callable(expected):  # a function is compared by what it does
        marker = object()
        same = callable(ours.default) and ours.default(marker) is expected(marker) is marker
    else:
        same = type(ours.default) is type(expected) and ours.default == expected
    return [] if same else [f"the default of {theirs.name} is {ours.default!r}, and not {expected!r}"]


@pytest.mark.parametrize(("document", "name"), every_method())
def test_the_method_is_there_with_its_signature(document: Document, name: str) -> None:
    function = inspect.getattr_static(getattr(api_of(document), document.name), name)
    assert callable(function)
    assert refused(document.methods[name], function) == []


def test_what_methods_take_out_of_their_keywords() -> None:
    """``run_concurrently`` and ``grouped`` don't reach the user's function."""
    named = {(name, k) for d in DOCUMENTS.values() for name, m in d.methods.items() for k in m.keywords}
    assert named == {("call_for_each_tower", "run_concurrently"), ("update", "grouped"), ("update_non_slot", "grouped")}
    seen: list[dict[str, Any]] = []
    distribution = v1.MirroredStrategy(["cpu:0", "cpu:1"])

    def note(*_: Any, **kwargs: Any) -> None:
        seen.append(kwargs)

    with distribution.scope():
        v = v1.get_variable("v", initializer=1.0)
        for name, keyword in sorted(named):
            first = {"update": [v], "update_non_slot": [distribution.non_slot_devices([v])]}.get(name, [])
            getattr(distribution, name)(*first, note, **{keyword: False, "other": 1})
    assert [set(kwargs) for kwargs in seen] == [{"other"}] * 3


@pytest.mark.parametrize(
    ("method", "argument"),
    [
        (method, parameter.name)
        for method in ("reduce", "batch_reduce", "read_var")
        for parameter in {d.methods[method].parameters[0]: 0 for d in DOCUMENTS.values() if method in d.methods}
        if parameter.name != "reduce_op"
    ],
)
def test_revisions_name_an_argument_differently(method: str, argument: str) -> None:
    distribution = v1.MirroredStrategy(["cpu:0", "cpu:1"])
    with distribution.scope():
        v = v1.get_variable("v", initializer=1.5)
        value = distribution.worker_device_index
        given: dict[str, Any] = {argument: v if method == "read_var" else "sum"}
        rest = {"reduce": {"value": value}, "batch_reduce": {"value_destination_pairs": [(value, v)]}}.get(method, {})
        result = getattr(distribution, method)(**given, **rest)
    assert float(result[0] if method == "batch_reduce" else result) == (1.5 if method == "read_var" else 1)


def test_an_argument_has_one_name_in_a_call() -> None:
    distribution = v1.MirroredStrategy(["cpu:0", "cpu:1"])
    with distribution.scope(), pytest.raises(TypeError, match="aggregation and method_string are one argument"):
        distribution.reduce(aggregation="sum", method_string="sum", value=1)


# --- documentation --------------------------------------------------------------------------------------


def every_public_name() -> dict[str, Any]:
    """The names of ``v1``, and the members of its classes, those that they inherit from one another included."""
    found: dict[str, Any] = {}
    for name in v1.__all__:
        thing = getattr(v1, name)
        if isinstance(thing, str) or thing is getattr(replicax, name, None):  # a constant; what is today's already
            continue
        found[name] = thing
        kinds = (
            [kind for kind in inspect.getmro(thing) if kind.__module__.startswith("replicax.compat")]
            if inspect.isclass(thing)
            else []
        )
        for kind in kinds:
            for member, value in vars(kind).items():
                is_documented = member == "_distributed_apply" or not member.startswith("_")
                if is_documented and isinstance(value, types.FunctionType | property | classmethod | staticmethod):
                    found[f"{name}.{member}"] = value
    return found


def counterparts(text: str) -> set[str]:
    """The names in a docstring that Replicax's public API has."""
    places = {
        "replicax": replicax,
        "strategy": replicax.Strategy,
        "extended": replicax.StrategyExtended,
        "strategy.extended": replicax.StrategyExtended,
    }
    found = set()
    for span in re.findall(r"`([A-Za-z_][\w.]*)", text):
        place, _, name = span.rpartition(".")
        owner = places.get(place)
        if owner is None and place.startswith("replicax."):
            owner = getattr(replicax, place.removeprefix("replicax."), None)
        is_attribute = owner is not None and (hasattr(owner, name) or name in _attributes_of(owner))
        if is_attribute and (owner is not replicax or name in replicax.__all__):
            found.add(span)
    return found


def test_each_name_says_what_it_is_today() -> None:
    """In its first two lines."""
    for name, thing in every_public_name().items():
        first = "\n".join((inspect.getdoc(thing) or "").splitlines()[:2])
        assert counterparts(first), f"{name} names nothing of today's: {first!r}"
