"""Draws the pictures of docs/tpu.md: ``python tools/docs/tpu_pictures.py [folder]``; by default into docs/."""

from __future__ import annotations

import sys
from pathlib import Path

from replicax import DeviceAssignment, Topology

DOCS = Path(__file__).parents[2] / "docs"


def main(folder: Path) -> None:
    v3 = Topology.from_name("v3:4x4")
    v3.plot(folder / "tpu-hosts.svg")
    DeviceAssignment.build(v3, computation_shape=[2, 2, 2], num_replicas=4).plot(folder / "tpu-replicas.svg")
    cube = Topology.from_name("v5p:4x4x4")
    DeviceAssignment.build(cube, computation_shape=[4, 1, 1, 1], num_replicas=16).plot(folder / "tpu-cube.svg")
    pod = Topology.from_name("v5p:16x16x24")
    DeviceAssignment.build(pod, computation_shape=[4, 4, 4, 1], num_replicas=96).plot(folder / "tpu-pod.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS)
