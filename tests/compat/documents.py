"""What the four documents of the original name: classes, properties, methods, arguments and defaults.

    python -m tests.compat.documents [FOLDER]

reads the documents and writes the table ``documents.json`` beside this file, which stands in for them where they are
not at hand. The documents come in three shapes (two generators' HTML, and a plain text): without its marks each is the
same text, in which a heading is a line of its own, and a method's heading is followed by its signature.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import html
import json
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

FOLDER = pathlib.Path(__file__).parents[2] / ".." / "shared" / "seeds"
TABLE = pathlib.Path(__file__).with_name("documents.json")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of a documented signature.

    Attributes:
      name: without its stars.
      kind: ``""``, ``"*"`` or ``"**"``.
      default: as it is written; ``None`` if the argument is required.
    """

    name: str
    kind: str
    default: str | None


@dataclasses.dataclass(frozen=True)
class Method:
    """One documented method.

    Attributes:
      parameters: without ``self``.
      keywords: what it takes out of its ``**kwargs``.
    """

    parameters: tuple[Parameter, ...]
    keywords: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Document:
    """One document.

    Attributes:
      path: of its class, ``tf.…``.
      inherits: the class's base, if there is one.
      properties: their names.
      methods: by name; ``__init__`` among them.
      names: the other classes and functions of the distribution API that it speaks of.
      members: what it says or shows of these that its own headings don't, by class.
      listed: the members that it lists for machines, where it does; not read for anything else.
      examples: how many blocks of code it marks as such, without those that are signatures.
      aggregations: the ways to combine values that it speaks of: strings, and members of ``VariableAggregation``.
    """

    path: str
    inherits: str | None
    properties: tuple[str, ...]
    methods: dict[str, Method]
    names: tuple[str, ...]
    members: dict[str, tuple[str, ...]]
    aggregations: tuple[str, ...]
    listed: tuple[str, ...]
    examples: int

    @property
    def name(self) -> str:
        return self.path.rsplit(".", 1)[-1]

    @property
    def is_first_generation(self) -> bool:
        """Whether it is in tower words."""
        return "contrib" in self.path


def is_there() -> bool:
    """Whether the documents themselves are at hand."""
    return bool(_files(FOLDER))


def documents() -> dict[str, Document]:
    """The documents by file name: read anew if they are at hand, from the table otherwise."""
    return read(FOLDER) if is_there() else from_table(TABLE.read_text())


def where() -> str:
    """Which of the two, for people."""
    return f"documents of the original: {'read anew' if is_there() else 'not at hand, taken from the committed table'}"


def read(folder: pathlib.Path) -> dict[str, Document]:
    texts = {path.name: path.read_text() for path in _files(folder)}
    elsewhere = frozenset().union(*(_names(text)[1] for text in texts.values()))
    return {name: parsed(text, elsewhere) for name, text in texts.items()}


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.glob("*.txt")) if folder.is_dir() else []


# --- reading --------------------------------------------------------------------------------------------


def plain(text: str) -> str:
    """A document without the marks of HTML and Markdown."""
    text = re.sub(_TAG, "", text)
    text = re.sub(r"^```.*$", "", text, flags=re.M)
    text = re.sub(r"^#+ ", "", text, flags=re.M)
    return html.unescape(text)


_TAG = r"<!--.*-->|</?[a-z][a-z0-9]*(?:[\s/][^>\n]*)?>"


def parsed(text: str, elsewhere: frozenset[str] = frozenset()) -> Document:
    """A document, from its text; ``elsewhere`` are names in other modules of ``tf``."""
    lines = [line.rstrip() for line in plain(text).splitlines()]
    path = next(line for line in lines if re.fullmatch(r"tf(\.\w+)+", line))
    base = re.search(r"^Inherits From: \[?`?(?:\w+\.)*(\w+)", "\n".join(lines), re.M)
    section, heading = "", ""
    properties: list[str] = []
    methods: dict[str, Method] = {}
    bodies: dict[str, list[str]] = {}
    for i, line in enumerate(lines):
        word = line.strip("`")
        if word in ("Properties", "Attributes", "Methods"):
            section = word
        elif re.fullmatch(r"[a-z_]\w*", word):
            if section in ("Properties", "Attributes"):
                properties.append(word)
            heading = word
        name = "__init__" if line.startswith(f"{path}(") else heading
        if name and name not in methods and line.startswith((f"{name}(", f"{path}(")):
            methods[name] = Method(tuple(_parameters(_balanced(lines[i:]))), ())
        bodies.setdefault(heading, []).append(line)
    for name, method in methods.items():
        methods[name] = dataclasses.replace(method, keywords=tuple(_keywords("\n".join(bodies.get(name, [])))))
    names = sorted(_names(text)[0] - elsewhere - {path.rsplit(".", 1)[-1]})
    members = _members("\n".join(lines), _FIRST if "contrib" in path else _SECOND)
    return Document(
        path=path,
        inherits=base and base[1],
        properties=tuple(properties),
        methods=methods,
        names=tuple(names),
        members=members,
        aggregations=tuple(_aggregations(text)),
        listed=tuple(re.findall(r'itemprop="property" content="(\w+)"', text)),
        examples=_examples(text),
    )


def _balanced(lines: list[str]) -> str:
    """The signature with which these lines begin."""
    text = "\n".join(lines)
    depth = 0
    for i, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == ")" and not depth:
            return text[text.index("(") : i + 1]
    raise ValueError(f"this signature has no end: {lines[0]!r}")


def _parameters(signature: str) -> Iterator[Parameter]:
    """Of ``"(a, b=1, *args)"``."""
    function = ast.parse(f"def f{signature}: pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + [ast.unparse(d) for d in arguments.defaults]
    for argument, default in zip(arguments.args, defaults, strict=True):
        yield Parameter(argument.arg, "", default)
    if arguments.vararg:
        yield Parameter(arguments.vararg.arg, "*", None)
    if arguments.kwarg:
        yield Parameter(arguments.kwarg.arg, "**", None)


def _keywords(body: str) -> Iterator[str]:
    """What a method's ``**kwargs`` may have for the method itself: names in quotes where ``**kwargs`` are described."""
    for described in re.findall(r"\*\*kwargs`?:(.*?)(?:\n\n|\Z)", body, re.S):
        yield from dict.fromkeys(re.findall(r'"(\w+)(?:=\w+)?"', described))


_OURS = ("tf.distribute.", "tf.contrib.distribute.", "tf.contrib.cluster_resolver.", "tf.tpu.")


def _names(text: str) -> tuple[set[str], set[str]]:
    """The classes and functions of the distribution API that a document speaks of, and the names elsewhere in ``tf``.

    The first are: what it names in a distribution module of ``tf``; what it names right in ``tf`` that has to do with
    towers, variables by name and how they are combined; and each class name in code or quotes, unless it is Python's.
    """
    text = html.unescape(re.sub(rf"\]\([^)]*\)|{_TAG}|https?:\S*|\w+(?:/[\w.-]+)+", " ", text))
    dotted = set(re.findall(r"\btf(?:\.\w+)+", text))
    ours = {
        name
        for name in dotted
        if name.startswith(_OURS) or re.fullmatch(r"tf\.(\w*tower\w*|get_variable|VariableAggregation)(\.\w+)?", name)
    }
    found = {next(part for part in name.split(".") if part not in _MODULES) for name in ours}
    spans = "\n".join(a or b for a, b in re.findall(r"`([^`\n]+)`|\"(\w+)\"", text))
    found |= {word for word in re.findall(r"(?<![\w./])[A-Z]\w*[a-z]\w*", spans) if not hasattr(builtins, word)}
    return found, {part for name in dotted - ours for part in name.split(".")}


_MODULES = ("tf", "contrib", "cluster_resolver", "distribute", "experimental", "tpu")


_FIRST = {
    "DistributionStrategy": r"(?:d|self|\w*distribution(?:_strategy)?)\.([a-z]\w*)",
    "TowerContext": r"(?:tower_ctx|get_tower_context\(\))\.([a-z]\w*)",
    "MultiStepContext": r"(?:context\.|- (?=\w+:))([a-z]+_\w+)",
    "PerDeviceDataset": r"(?:\w+\.distribute_dataset\([^()]*\)|distributed_dataset)\.([a-z]\w*)",
    "PerDeviceIterator": r"iterator\.([a-z]\w*)",
    "Optimizer": r"its\s+`(\w+)`\s+method",
}
_SECOND = {
    "Strategy": r"(?:strategy\.|`(?=\w+\(\)`))([a-z]\w*)",
    "StrategyExtended": r"(?:strategy\.)?extended\.([a-z]\w*)",
    "InputContext": r"input_context\.([a-z]\w*)",
    "ValueContext": r"ctx\.([a-z]\w*)",
    "ReduceOp": r"(?:tf\.distribute\.)?ReduceOp\.([A-Z]+)",
    "DistributedDataset": r"dist_dataset\.([a-z]\w*)",
    "DistributedIterator": r"iterator\.([a-z]\w*)",
}
"""What the documents of each generation write where they use an object of a class, and which member."""


def _members(text: str, patterns: dict[str, str]) -> dict[str, tuple[str, ...]]:
    text = re.sub(r"(?<=\()\s*\n\s*", "", text)
    found = {kind: set(re.findall(rf"(?<![\w.])(?:{pattern})", text)) for kind, pattern in patterns.items()}
    return {kind: tuple(sorted(names)) for kind, names in found.items() if names}


def _examples(text: str) -> int:
    """Between fences, which have ``python`` after a space where they are about a signature; or quoted."""
    without_signatures = re.sub(r"^``` python\n.*?^```$", "", text, flags=re.M | re.S)
    fenced = re.findall(r"^```(?:python)?\n.*?^```$", without_signatures, re.M | re.S)
    quoted = re.findall(r"(?:^>     .*\n)+", without_signatures, re.M)
    return len(fenced) + len(quoted)


def _aggregations(text: str) -> Iterator[str]:
    """``"sum"`` and its like, where strings are said to be; members of ``VariableAggregation``."""
    yield from sorted(set(re.findall(r"VariableAggregation\.([A-Z_]+)", text)))
    if "method_string" in text:
        yield from sorted(set(re.findall(r'"(sum|mean)"', text)))


# --- the table ------------------------------------------------------------------------------------------


def to_table(found: dict[str, Document]) -> str:
    return json.dumps({name: dataclasses.asdict(document) for name, document in found.items()}, indent=1) + "\n"


def from_table(text: str) -> dict[str, Document]:
    def document(fields: dict[str, Any]) -> Document:
        methods = {
            name: Method(tuple(Parameter(**p) for p in method["parameters"]), tuple(method["keywords"]))
            for name, method in fields.pop("methods").items()
        }
        members = {kind: tuple(names) for kind, names in fields.pop("members").items()}
        rest = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
        return Document(methods=methods, members=members, **rest)

    return {name: document(fields) for name, fields in json.loads(text).items()}


def main() -> None:
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    found = read(folder)
    if not found:
        raise SystemExit(f"there are no documents in {folder}")
    TABLE.write_text(to_table(found))


if __name__ == "__main__":
    main()
