"""What Replicax uses of JAX that JAX does not promise, and that it leaves JAX as it was."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import jax
import pytest

import replicax
from replicax._jax import internals, traces

SOURCES = pathlib.Path(replicax.__file__).parent
PUBLIC = {"jaxlib.version", "jaxlib.mlir"}


def imports(path: pathlib.Path, word: str) -> Iterator[tuple[str, str, str]]:
    """What a file that has ``word`` imports: the module, the name in it, and what it is called there."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)) if word in text else ():
        if isinstance(node, ast.Import):
            yield from ((alias.name, "", alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name, alias.asname or alias.name) for alias in node.names)


def test_internals_are_imported_in_one_place() -> None:
    found = {
        path.relative_to(SOURCES).as_posix()
        for path in SOURCES.rglob("*.py")
        for word in ("jax._src", "jaxlib")
        for module, _, _ in imports(path, word)
        if module.startswith(word) and module not in PUBLIC
    }
    assert found == {"_jax/internals.py"}


def test_each_internal_has_its_reason() -> None:
    documented = {line.split("  ")[0] for line in str(internals.__doc__).splitlines() if "  " in line[:23]}
    assert {name for name in vars(internals) if not name.startswith("__")} <= documented


def used_names() -> Iterator[tuple[str, str]]:
    for path in SOURCES.rglob("*.py"):
        ours = {
            alias: name for module, name, alias in imports(path, "internals") if module == "replicax._jax.internals"
        }
        for node in ast.walk(ast.parse(path.read_text())) if ours else ():
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ours:
                yield ours[node.value.id], node.attr


def test_names_are_there() -> None:
    """A new JAX that has moved one is seen here first."""
    assert [f"{module}.{name}" for module, name in used_names() if not hasattr(getattr(internals, module), name)] == []


LEFT_ALONE = """
import sys
import jax, jax.numpy, jax.extend, optax, flax.nnx
import jax._src.interpreters.ad, jax._src.source_info_util

def state():
    modules = [m for name, m in sys.modules.items() if name.split(".")[0] in ("jax", "jaxlib", "optax")]
    return {(m.__name__, name): id(value) for m in modules for name, value in vars(m).items() if callable(value)}

before = state()
import replicax
for name in replicax.__all__:
    getattr(replicax, name)
replicax.use_cpu_devices(2)
strategy = replicax.MirroredStrategy()
with strategy.scope():
    w = replicax.Variable(1.5)
x = strategy.distribute_values_from_function(lambda c: jax.numpy.float32(c.replica_id_in_sync_group))
step = lambda x: replicax.value_and_grad(lambda: jax.numpy.sinh(w.value * x), [w])()
strategy.run(step, args=(x,))
with replicax.debug():
    strategy.run(step, args=(x,))
after = state()
print([name for name in before if before[name] != after[name]])
"""


def test_jax_is_left_as_it_was() -> None:
    done = subprocess.run([sys.executable, "-c", LEFT_ALONE], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_a_jax_whose_caches_ignore_contexts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    traces.check_caches.__wrapped__()
    monkeypatch.setattr(traces, "_generation", lambda number: jax.ensure_compile_time_eval())
    with pytest.raises(RuntimeError, match="reuses what it has traced for jit, checkpoint, scan"):
        traces.check_caches.__wrapped__()
