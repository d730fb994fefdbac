"""The uses of distribution in a program: where they stand, what takes their place, and what can be written instead."""

from __future__ import annotations

import ast
import dataclasses
import re

from replicax_migrate.bindings import deep_recursion, last_name
from replicax_migrate.counterparts import (
    OF_STEPS,
    TF_CONFIG,
    V1,
    Counterpart,
    has,
    keywords,
    of_member,
    of_path,
    paths,
    public,
)
from replicax_migrate.inference import DISTINCT, Definition, DottedName, Inference, Instance, canonical
from replicax_migrate.original_names import MODERN, TOWER
from replicax_migrate.telltale_words import (
    ATTRIBUTES,
    COMMON_WORDS,
    ESTIMATOR,
    KEYWORDS,
    STRATEGY_KINDS,
    UNMISTAKABLE,
    has_tower_words,
    is_tower_program,
    may_use,
)


@dataclasses.dataclass(frozen=True)
class Edit:
    """A replacement inside a line."""

    line: int  # its number, from 1
    start: int  # in bytes of UTF-8, from the start of the line, as :mod:`ast` counts
    end: int  # behind the last byte
    old: str  # what must stand there
    new: str  # what takes its place


@dataclasses.dataclass(frozen=True)
class NameUse:
    """One use of a name of distribution."""

    line: int  # where it stands, from 1
    column: int  # likewise, from 1
    name: str  # as it is written
    counterpart: Counterpart
    is_assumed: bool = False  # whether only the name of a value says what it is, or it may be something else as well
    edit: Edit | None = None  # what ``--write`` does


_SURELY_NAMED = re.compile(r"(distribution|distribute|dist|mirrored|tpu)_strategy(\.extended)?$")
"""Values whose name is enough, also in a program that does not import TensorFlow itself."""

_OF_MODELS = {
    "compile": ("optimizer", "loss", "metrics"),
    "fit": ("epochs", "steps_per_epoch", "validation_data", "callbacks"),
}
"""Arguments that only these methods of a Keras model take."""

_PARTS = {"extended", "cluster_resolver"}
"""Members that are reported with the name after them, as one use."""

_MODULES = {module for module in (*MODERN, *TOWER) if "distribute" in module or "cluster_resolver" in module}
_KNOWN = {**paths(TOWER), **paths(MODERN)}
_INTERNAL = re.compile(r"(python|contrib)\.(distribute|training\.distribut)|python\.tpu|__internal__\.distribute")
_INTERNALS = Counterpart("nothing: TensorFlow's own internals")
_STAR = "the names that it brings are followed, but for those that the program binds itself"


@deep_recursion()
def find_uses(tree: ast.Module, source_lines: list[str]) -> list[NameUse]:
    """All uses in a program, in the order of the source."""
    return _Search(tree, source_lines).uses() if may_use(tree) else []


class _Search:
    def __init__(self, tree: ast.Module, source_lines: list[str]) -> None:
        self.tree = tree
        self.lines = source_lines
        self.inference = Inference(tree)
        self.parents = self.inference.bindings.parents
        self.own_members = self.inference.bindings.members
        self.stored = {
            known.path
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and not isinstance(node.ctx, ast.Load)
            and isinstance(known := self.inference.of(node), DottedName)
        }
        self.of_steps: set[NameUse] = set()
        self.is_tower = is_tower_program(tree)
        self.has_tower_words = has_tower_words(tree)
        self.imports_tensorflow = any(
            re.match(r"tensorflow|tf_|keras", name)
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in (getattr(node, "module", None) or "", *(alias.name for alias in node.names))
        )

    def uses(self) -> list[NameUse]:
        found: list[NameUse] = []
        for node in ast.walk(self.tree):
            match node:
                case ast.Attribute():
                    use = self._attribute(node)
                    found.extend([use] if use else [])
                case ast.Name(ctx=ast.Load()):
                    use = self._path(node)
                    found.extend([use] if use else [])
                case ast.Import() | ast.ImportFrom():
                    found.extend(self._import(node))
                case ast.Call():
                    found.extend([*self._keywords(node), *self._asked_for(node)])
                case ast.Constant("TF_CONFIG") if not isinstance(self.parents.get(node), ast.Expr):
                    found.append(self._use(node, "'TF_CONFIG'", TF_CONFIG))
        if set(found) <= self.of_steps:
            return []  # no distribution
        return sorted(set(found), key=lambda use: (use.line, use.column, use.name))

    # --- names of TensorFlow's modules --------------------------------------------------------------------

    def _path(self, node: ast.Name | ast.Attribute) -> NameUse | None:
        """The use that a dotted name of TensorFlow's is, if it is one, and no part of a longer one."""
        known = self.inference.of(node)
        if not isinstance(known, DottedName) or known.path.startswith("replicax"):
            return None
        if isinstance(node, ast.Name) and not self.inference.is_imported(node):
            return None  # a name of the program's own
        counterpart = of_path(known.path, self.is_tower)
        if not self.has_tower_words and of_path(known.path) is None:
            counterpart = None  # a variable, or the like, which may just as well be an estimator's
        parent = self.parents.get(node)
        if isinstance(parent, ast.Attribute):
            longer = self.inference.of(parent)
            if isinstance(longer, DottedName) and of_path(longer.path, self.is_tower) is not None:
                return None
        if counterpart is None:
            is_module = any(f"{each}.".startswith(f"{known.path}.") for each in _MODULES)
            is_inside = any(known.path.startswith(f"{module}.") for module in _MODULES)
            is_internal = _INTERNAL.match(known.path) is not None
            is_own = known.path in self.stored  # what the program has put there itself
            is_unknown = is_inside or is_internal
            if not known.is_sure or is_module or is_own or not is_unknown or isinstance(parent, ast.Attribute):
                return None
            what = Counterpart("nothing: no public name of tf.distribute's that is known here")
            counterpart = _INTERNALS if is_internal else what
        is_sure = known.is_sure and known.path not in self.stored and not self._is_from_one_of_stars(node)
        edit = self._replacing(node, counterpart) if is_sure else None
        return self._noted(known.path, self._use(node, ast.unparse(node), counterpart, not known.is_sure, edit))

    def _noted(self, path: str, use: NameUse) -> NameUse:
        """``use``, noted down if the name is of steps rather than of distribution."""
        if path in OF_STEPS:
            self.of_steps.add(use)
        return use

    def _is_from_one_of_stars(self, node: ast.expr) -> bool:
        """Whether a name may come from another ``import *`` just as well."""
        while isinstance(node, ast.Attribute):
            node = node.value
        several = len(self.inference.bindings.stars) > 1
        return several and isinstance(node, ast.Name) and self.inference.is_from_star(node)

    def _replacing(self, node: ast.expr, counterpart: Counterpart) -> Edit | None:
        if not counterpart.is_renaming or node.lineno != node.end_lineno or node.end_col_offset is None:
            return None
        return self._checked(
            Edit(node.lineno, node.col_offset, node.end_col_offset, ast.unparse(node), counterpart.today)
        )

    def _import(self, node: ast.Import | ast.ImportFrom) -> list[NameUse]:
        found = []
        for alias in node.names:
            if alias.name == "*" and isinstance(node, ast.ImportFrom):
                found.extend(self._star(node, alias))
                continue
            whole = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
            path = None if getattr(node, "level", 0) else canonical(whole)
            if not path:
                continue
            counterpart = of_path(path, self.is_tower)
            if counterpart is not None:
                counterpart = dataclasses.replace(counterpart, is_renaming=False)
            elif path in _MODULES:
                counterpart = Counterpart(f"import {V1}" if self.is_tower else "import replicax")
            elif _INTERNAL.match(path):
                counterpart = _INTERNALS
            else:
                continue
            found.append(self._noted(path, self._use(alias, f"import {alias.name}", counterpart)))
        return found

    def _star(self, node: ast.ImportFrom, alias: ast.alias) -> list[NameUse]:
        """The use that ``from tensorflow.distribute import *`` is."""
        path = None if node.level else canonical(node.module or "")
        if path is None or not any(f"{module}.".startswith(f"{path}.".lstrip(".")) for module in _MODULES):
            return []
        today = f"import {V1}" if self.is_tower else "import replicax"
        return [self._use(alias, "import *", Counterpart(today, differs=_STAR))]

    # --- members of strategies, contexts, … ---------------------------------------------------------------

    def _attribute(self, node: ast.Attribute) -> NameUse | None:
        owner = self.inference.of(node.value)
        if isinstance(owner, DottedName):
            return self._path(node)
        if isinstance(owner, Instance):
            return self._member(node, node.attr, owner)
        parent = self.parents.get(node)
        if node.attr in ATTRIBUTES and not isinstance(owner, Definition):
            whole = parent if isinstance(parent, ast.Attribute) else node
            name = f"….{whole.attr}" if whole is node else f"….{node.attr}.{whole.attr}"
            return self._use(node, name, ATTRIBUTES[node.attr], is_assumed=ATTRIBUTES[node.attr] is ESTIMATOR)
        if owner is None and isinstance(node.ctx, ast.Load) and node.attr in UNMISTAKABLE:
            use = self._member(node, node.attr, Instance(UNMISTAKABLE[node.attr]))
            is_guess = node.attr in COMMON_WORDS and not self.is_tower
            return dataclasses.replace(use, is_assumed=True, edit=None) if use is not None and is_guess else use
        if owner is None and self._is_of_a_model(node):
            return self._member(node, node.attr, Instance("Model", is_sure=False))
        is_called = isinstance(parent, ast.Call) and parent.func is node and self.imports_tensorflow
        if owner is None and node.attr in DISTINCT - self.own_members and is_called:
            homes = sorted(path for path, name in _KNOWN.items() if name == node.attr)
            counterpart = of_path(homes[0], self.is_tower)
            assert counterpart is not None
            return self._use(node, f"….{node.attr}", counterpart, is_assumed=True)
        return None

    def _is_of_a_model(self, node: ast.Attribute) -> bool:
        """Whether this is a call of a Keras model's method, by arguments that nothing else takes."""
        call = self.parents.get(node)
        if not isinstance(call, ast.Call) or call.func is not node:
            return False
        return not {keyword.arg for keyword in call.keywords}.isdisjoint(_OF_MODELS.get(node.attr, ()))

    def _asked_for(self, call: ast.Call) -> list[NameUse]:
        """The use that ``getattr(strategy, "name")`` or ``hasattr`` is."""
        match call:
            case ast.Call(func=ast.Name("getattr" | "hasattr"), args=[value, ast.Constant(str(name)), *_]):
                owner = self.inference.of(value)
                if isinstance(owner, Instance) and of_member(owner.kind, name) is not None:
                    use = self._member(ast.copy_location(ast.Attribute(value, name, ast.Load()), call), name, owner)
                    return [dataclasses.replace(use, edit=None)] if use is not None else []
        return []

    def _member(self, node: ast.Attribute, name: str, owner: Instance) -> NameUse | None:
        if not owner.is_sure and not self.imports_tensorflow and not _SURELY_NAMED.search(ast.unparse(node.value)):
            return None
        parent = self.parents.get(node)
        if owner.kind == "PerReplica" and isinstance(parent, ast.Call) and parent.func is node:
            return None  # a dict's
        counterpart = of_member(owner.kind, name, self.is_tower)
        is_there = has(public(owner.kind), name)
        if owner.is_today and (is_there or (counterpart is not None and counterpart.today == "the same")):
            return None
        if counterpart is None and not is_there:
            is_own = (isinstance(node.value, ast.Name) and node.value.id == "self") or name.startswith("__")
            if is_own or not owner.is_sure or owner.kind not in STRATEGY_KINDS or not isinstance(node.ctx, ast.Load):
                return None
            what = "TensorFlow's own internals" if name.startswith("_") else "not known here"
            counterpart = Counterpart(f"nothing: {what}")
        if counterpart is None:
            return None
        if name in _PARTS and isinstance(parent, ast.Attribute) and self._attribute(parent) is not None:
            return None
        receiver = ast.unparse(node.value)
        receiver = receiver if re.fullmatch(r"[\w.()]{1,60}", receiver) else "…"
        edit = None
        if counterpart.is_renaming:
            end = node.end_col_offset or 0
            edit = self._checked(Edit(node.end_lineno or 0, end - len(name.encode()), end, name, counterpart.today))
            counterpart = dataclasses.replace(counterpart, today=f"{receiver}.{counterpart.today}")
        is_own = name in self.own_members  # of a class of the program's, which may be what this is of
        is_assumed = not owner.is_sure and (is_own or name not in UNMISTAKABLE)
        return self._use(node, f"{receiver}.{name}", counterpart, is_assumed, None if is_assumed or is_own else edit)

    def _keywords(self, call: ast.Call) -> list[NameUse]:
        found = []
        function = self.inference.of(call.func)
        old: dict[str, str] = {}
        if isinstance(function, DottedName) and not self.is_tower:
            counterpart = of_path(function.path)
            path, _, last = (counterpart.today if counterpart else function.path).rpartition(".")
            old = keywords(None, last) or keywords(path.rpartition(".")[2], last)
        elif isinstance(call.func, ast.Attribute) and not self.is_tower:
            owner = self.inference.of(call.func.value)
            if isinstance(owner, Instance):
                old = keywords(owner.kind, call.func.attr)
        for keyword in call.keywords:
            counterpart = None
            if keyword.arg in old:
                counterpart = Counterpart(old[keyword.arg])
            elif keyword.arg in KEYWORDS and not (isinstance(function, DottedName) and function.path in _KNOWN):
                counterpart = KEYWORDS[keyword.arg]
            if counterpart is not None:
                is_assumed = isinstance(function, DottedName) and not function.is_sure
                name = f"{last_name(call.func) or '…'}({keyword.arg}=)"
                found.append(self._use(keyword, name, counterpart, is_assumed))
        return found

    # --- all of them --------------------------------------------------------------------------------------

    def _use(
        self,
        node: ast.expr | ast.alias | ast.keyword,
        name: str,
        counterpart: Counterpart,
        is_assumed: bool = False,
        edit: Edit | None = None,
    ) -> NameUse:
        line, offset = node.lineno, node.col_offset
        if isinstance(node, ast.Attribute) and (node.end_lineno != line or name.startswith("…")) and node.end_lineno:
            line, offset = node.end_lineno, (node.end_col_offset or 0) - len(node.attr.encode())
        before = self.lines[line - 1].encode()[:offset].decode(errors="replace") if line <= len(self.lines) else ""
        if edit is not None and edit.old == edit.new:
            edit = None
        return NameUse(line, len(before) + 1, name, counterpart, is_assumed, edit)

    def _checked(self, edit: Edit) -> Edit | None:
        """An edit whose place has the text that it expects (inside f-strings, Python 3.11 counts otherwise)."""
        if not 0 < edit.line <= len(self.lines):
            return None
        there = self.lines[edit.line - 1].encode()[edit.start : edit.end]
        return edit if there == edit.old.encode() else None
