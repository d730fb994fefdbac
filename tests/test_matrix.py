"""What ``make matrix`` and the writing of locks do around pip and pytest."""

from __future__ import annotations

import pathlib
import re
import tomllib

from packaging.requirements import Requirement

from tests.matrix import lock, run

ROOT = pathlib.Path(run.__file__).parents[2]


def test_the_lock_of_a_combination_replaces_the_packages_of_its_jax():
    common = '# all\nFlax==1; python_version < "3.12"\nflax==2; python_version >= "3.12"\njax-lib==1\nnumpy==2\n'
    assert run.lock(common, "# other\nflax==3\njax_lib==4\n") == "# all\nnumpy==2\n# other\nflax==3\njax_lib==4\n"


def test_every_jax_of_the_matrix_replaces_all_that_goes_with_it():
    common = (ROOT / "constraints.txt").read_text()
    for version, path in run.LOCKS.items():
        pins = dict(line.split("==") for line in path.read_text().splitlines()[1:])
        assert set(pins) == lock.OF_JAX
        assert pins["jax"] == pins["jaxlib"] == version
        assert f"\njax=={version}\n" in run.lock(common, path.read_text())


def test_the_dependency_on_jax_is_what_the_matrix_runs():
    [oldest, newest] = re.findall(r'"jax>=([0-9.]+),<([0-9.]+)"', (ROOT / "pyproject.toml").read_text())[0]
    versions = sorted(run.LOCKS, key=lambda v: [int(part) for part in v.split(".")])
    assert versions[0] == oldest
    major, minor, patch = (int(part) for part in versions[-1].split(".")[:3])
    assert newest == f"{major}.{minor}.{patch + 1}"


def test_the_lock_has_what_the_dependencies_allow_and_each_names_its_oldest_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    needed = [Requirement(text) for some in (project["dependencies"], *optional.values()) for text in some]
    locked = dict(re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for r in needed:
        if r.name in locked and r.name not in ("jax", "grain"):
            assert r.specifier.contains(locked[r.name]), r
    for r in map(Requirement, [*project["dependencies"], *optional["nnx"], *optional["equinox"]]):
        assert ">=" in str(r.specifier), r


def test_a_jax_is_run_only_on_the_pythons_that_it_supports():
    assert [run.supports("0.10.2", (3, n)) for n in (11, 12, 13)] == [True, True, True]
    assert [run.supports("0.12.0.1", (3, n)) for n in (11, 12, 13)] == [False, True, True]


def test_a_merged_lock_has_markers_where_pythons_differ():
    frozen = {
        (3, 11): "Jax==1\nnumpy==1\nonly==1\nthere==5",
        (3, 12): "Jax==2\nnumpy==2\nthere==5",
        (3, 13): "Jax==2\nnumpy==3\nthere==5",
    }
    assert lock.merged(frozen) == [
        'Jax==1; python_version < "3.12"',
        'Jax==2; python_version >= "3.12"',
        'numpy==1; python_version < "3.12"',
        'numpy==2; python_version >= "3.12" and python_version < "3.13"',
        'numpy==3; python_version >= "3.13"',
        "only==1",
        "there==5",
    ]
    outer = {(3, 11): "a==1", (3, 12): "a==2", (3, 13): "a==1"}
    assert lock.merged(outer)[0] == 'a==1; python_version == "3.11" or python_version == "3.13"'
