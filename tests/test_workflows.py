"""Workflows that publish: their syntax, what they may do, and that they run only what is pinned."""

from __future__ import annotations

import pathlib
import re

import pytest
import yaml

ROOT = pathlib.Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


class OneKeyEach(yaml.SafeLoader):
    """A loader that takes ``on`` for a word, and no key twice."""

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key is there twice: {keys}"
        return {key.value: self.construct_object(value, deep=True) for key, value in node.value}


def workflow(path):
    return yaml.load(path.read_text(), OneKeyEach)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_their_commits(path) -> None:
    lines = [line.strip() for line in path.read_text().splitlines() if "uses:" in line]
    assert lines
    for line in lines:
        assert re.fullmatch(r"- uses: [\w.-]+/[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", line), line


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_what_comes_from_outside_is_not_run_as_a_command(path) -> None:
    for job in workflow(path)["jobs"].values():
        for step in job["steps"]:
            assert "${{" not in step.get("run", "")


def test_publishing_is_by_trust_and_may_do_nothing_else() -> None:
    found = workflow(ROOT / ".github" / "workflows" / "publish.yml")
    assert found["permissions"] == {}
    build, publish = found["jobs"]["build"], found["jobs"]["publish"]
    assert build["permissions"] == {"contents": "read"}
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["environment"] == "release"
    assert publish["needs"] == "build"
    assert [step["uses"].partition("@")[0] for step in publish["steps"]] == [
        "actions/download-artifact",
        "pypa/gh-action-pypi-publish",
    ]
    assert "password" not in str(found)
    assert "secrets" not in str(found)


def test_the_workflow_builds_as_a_contributor_does() -> None:
    commands = [
        step.get("run", "") for step in workflow(ROOT / ".github/workflows/publish.yml")["jobs"]["build"]["steps"]
    ]
    targets = re.findall(r"make (\w+)", " ".join(commands))
    assert targets == ["dist"]
    assert re.search(r"^dist:", (ROOT / "Makefile").read_text(), re.MULTILINE)
