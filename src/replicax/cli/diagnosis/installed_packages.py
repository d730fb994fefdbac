"""Checks the versions of Python and of the packages that Replicax requires."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from replicax.cli.diagnosis.findings import Finding, ok, wrong

_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "jax-cuda12-pjrt", "jax-cuda13-pjrt", "jax-rocm7-plugin")
"""Packages that fit one version of jaxlib; with another version JAX ignores them, or fails."""
_SHOWN = ("jax", "jaxlib", "optax", "grain", "orbax-checkpoint", "libtpu", *_PLUGINS)


def check(seconds: float) -> list[Finding]:
    """Python's version and those of the packages."""
    return [_python(), *_packages()]


def _python() -> Finding:
    version = platform.python_version()
    what = f"Python {version}, Replicax {version_of('replicax') or 'from its sources'}"
    data = {"python": version, "replicax": version_of("replicax")}
    supported = _requires_python()
    if supported and not SpecifierSet(supported).contains(version, prereleases=True):
        return wrong("software", what, f"Replicax supports Python {supported}: use such a Python", **data)
    return ok("software", what, **data)


def _packages() -> Iterator[Finding]:
    versions: dict[str, str] = {}
    for needed in _requirements():
        version = version_of(needed.name)
        versions[needed.name] = version or ""
        supported = str(needed.specifier) or "any version"
        if version is None:
            install = f"pip install '{needed.name}{needed.specifier}'"
            yield wrong("software", f"{needed.name} is not installed", install, package=needed.name)
        elif not needed.specifier.contains(version, prereleases=True):
            yield wrong(
                "software",
                f"{needed.name} {version} is not supported: {supported}",
                f"pip install '{needed.name}{needed.specifier}'",
                package=needed.name,
                version=version,
                supported=supported,
            )
    jaxlib = versions.get("jaxlib")
    for name in ("libtpu", *_PLUGINS):
        version = version_of(name)
        if version is None:
            continue
        versions[name] = version
        if name != "libtpu" and jaxlib and version != jaxlib:
            yield wrong(
                "software",
                f"{name} {version} does not go with jaxlib {jaxlib}: JAX leaves the devices out, or fails",
                f"pip install '{name}=={jaxlib}'",
                package=name,
                version=version,
            )
    shown = ", ".join(f"{name} {versions[name]}" for name in _SHOWN if versions.get(name))
    yield ok("software", shown or "no package is known", versions=versions)


def _requirements() -> list[Requirement]:
    """The requirements of this release, and those of JAX on jaxlib."""
    needed = [*requirements_of("replicax"), *(r for r in requirements_of("jax") if r.name == "jaxlib")]
    return [r for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]


def requirements_of(package: str) -> list[Requirement]:
    """The requirements of an installed package, with its extras; none if it is not installed."""
    try:
        return [Requirement(text) for text in importlib.metadata.requires(package) or ()]
    except importlib.metadata.PackageNotFoundError:
        return []


def _requires_python() -> str:
    try:
        return str(importlib.metadata.metadata("replicax").json.get("requires_python", ""))
    except importlib.metadata.PackageNotFoundError:
        return ""


def version_of(package: str) -> str | None:
    """The version of a package; ``None`` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
