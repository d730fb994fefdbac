"""The devices of a TPU slice that is not there, to compile for."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import topologies

from replicax.tpu.generations import HOST, parse_slice


def absent_devices(name: str) -> list[jax.Device]:
    """The devices of a TPU slice by its name, whether or not there is one: XLA compiles for them, but nothing runs.

    Args:
      name: such as ``"v5e:4x4"``.

    Raises:
      ValueError: there is no such slice; the message lists some that there are.
      RuntimeError: libtpu, which has the compiler, is not installed.
    """
    kind, shape = parse_slice(name)
    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise RuntimeError(
            f"the devices of {name!r} come from libtpu, which is not installed: pip install 'replicax[tpu]'. No TPU is "
            "needed. To run the step rather than compile it, emulate the slice: TPUClusterResolver(emulate=...)."
        )
    # Without the first three libtpu looks for the machine that it is on, and waits for it. It lets only one process use
    # it at a time, as if there were a TPU to share, and leaves logs behind: both are of no use here.
    alone = {
        "TPU_ACCELERATOR_TYPE": kind.accelerator_type(shape),
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_LOG_DIR": "disabled",
    }
    # Left to itself libtpu refuses a single chip, as it does not fill a host, ...
    options: dict[str, Any] = {"chips_per_host_bounds": [min(n, size) for n, size in zip(HOST, shape, strict=True)]}
    if kind.devices_per_chip < kind.cores_per_chip:
        options["chip_config_name"] = "megacore"  # ... and shows v4 as it was before megacore.
    with _environment(alone):
        try:
            return list(topologies.get_topology_desc(name, platform="tpu", **options).devices)
        except Exception as error:
            raise ValueError(f"libtpu knows no TPU slice {name!r}: {error}") from error


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """With these environment variables, unless they are set already."""
    new = {key: value for key, value in values.items() if key not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for key in new:
            os.environ.pop(key, None)
