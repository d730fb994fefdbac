"""Messages name the user's line, however deep in libraries an error or an operation comes from."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import sysconfig
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import replicax
from replicax import errors

INSTALLED = os.path.dirname(os.path.dirname(jax.__file__))
HERE = r"test_users_line\.py:\d+"


@pytest.mark.parametrize(
    ("files", "position"),
    [
        (["optax/base.py", "jax/core.py", "", "flax/linen.py"], 2),
        (["optax/base.py", "jax/core.py", "project/train.py", "flax/linen.py", "project/main.py"], 2),
        (["jaxlib/core.py", "keras/src/losses.py"], None),
        (["jax/core.py", "jaxgpt/model.py"], 1),
        ([], None),
    ],
)
def test_which_frame_is_the_users(files: list[str], position: int | None) -> None:
    """The first that belongs to no library, or else to a project that is installed where the libraries are."""
    frames = [os.path.join(INSTALLED, file) if file else "/home/me/train.py" for file in files]
    script = os.path.join(sysconfig.get_path("scripts"), "train")
    assert errors.users_position([errors.__file__, os.__file__, *frames, script]) == (
        None if position is None else position + 2
    )


def test_a_library_in_a_folder_of_pythonpath(tmp_path: pathlib.Path) -> None:
    """As `pip install --target` puts it there."""
    library = tmp_path / "libraries" / "equinox" / "__init__.py"
    library.parent.mkdir(parents=True)
    library.write_text("")
    program = f"from replicax import errors; print(errors.users_position([{str(library)!r}, '/home/me/train.py']))"
    path = os.pathsep.join([str(library.parents[1]), *sys.path])
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, capture_output=True)
    assert done.stdout == b"1\n", done.stderr


def test_an_error_inside_another_library(pair) -> None:
    def step(n):
        return optax.cosine_decay_schedule(1.0, n)(0)

    with pytest.raises(jax.errors.TracerBoolConversionError, match=rf"'step' at .*{HERE}: `return optax\."):
        pair.run(step, args=(jnp.int32(3),))


def test_a_collective_inside_another_library(pair) -> None:
    norm = linen.BatchNorm(use_running_average=False, axis_name=replicax.REPLICA_AXIS)
    x = pair.distribute_values_from_function(lambda ctx: np.ones((2, 3), np.float32))
    state = norm.init(jax.random.key(0), jnp.ones((2, 3)))

    def step(x):
        return jax.lax.cond(x.sum() > 0, lambda: norm.apply(state, x, mutable=["batch_stats"])[0], lambda: x)

    with pytest.raises(replicax.errors.DeadlockError, match=rf"the collective \S+ at .*{HERE} "):
        pair.run(step, args=(x,))


@pytest.fixture
def names(monkeypatch) -> dict[str, tuple[str, str]]:
    """The files of a notebook's cells: they have the names of temporary ones, and do not exist."""
    names = {f"/tmp/ipykernel_7/{i}.py": ("Cell", f"In[{i}]") for i in (3, 4)}
    shell = types.SimpleNamespace(compile=types.SimpleNamespace(format_code_name=names.get))
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    return names


def test_a_line_in_a_cell_of_a_notebook(pair, names) -> None:
    with pair.scope():
        cell = {"w": replicax.Variable(0.0, name="w")}
    exec(compile("def step(x):\n    w.assign(x[0])\ndef named(x):\n    int(x[0])", min(names), "exec"), cell)
    x = pair.distribute_values_from_function(lambda ctx: np.ones(2, np.float32))
    with pytest.raises(replicax.errors.LocalityError, match=r"at Cell In\[3\], line 2 \(step\)"):
        pair.run(cell["step"], args=(x,))
    with pytest.raises(jax.errors.ConcretizationTypeError, match=r"step 'named' at Cell In\[3\], line 4"):
        pair.run(cell["named"], args=(x,))
    assert errors.shown_line("train.py", 3) == "train.py:3"


def test_a_warning_in_a_cell_of_a_notebook(pair, names) -> None:
    """Each cell has its own, also if the lines have one number."""
    with pair.scope():
        w = replicax.Variable(1.0, name="w")
    x = pair.distribute_values_from_function(lambda ctx: np.ones(4, np.float32))
    cell = {"jnp": jnp, "warn": errors.warn, "run": pair.run, "x": x, "w": w, "gradients": replicax.value_and_grad}
    step = "w.assign_sub(ctx().all_reduce('sum', gradients(lambda: jnp.mean(x * w.value), [w])()[1][0]) * rate)"
    cell["ctx"] = replicax.get_replica_context
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for rate, file in enumerate(names):
            exec(compile(f"warn('careful')\nrun(lambda x, rate={rate}: {step}, (x,))", file, "exec"), cell)
    places = [(w.filename, w.lineno, w.category) for w in caught]
    warned = ((1, UserWarning), (2, replicax.errors.ShareWarning))
    assert places == [(f"Cell In[{i}]", *where) for i in (3, 4) for where in warned]


def test_a_warning_inside_another_library() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.tree.map(lambda _: errors.warn("careful"), [1])
    assert [w.filename for w in caught] == [__file__]
