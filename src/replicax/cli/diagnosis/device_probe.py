"""The program that tests whether the devices work, run as a separate process: ``python device_probe.py``.

It prints a line of JSON after each stage, which shows the stage that hangs. It imports JAX only.
"""

from __future__ import annotations

import json
import time
from typing import Any

_MIB = 2**20


def main() -> None:
    """Import JAX, find the devices, compile a program, and sum over the devices."""
    began = time.perf_counter()

    def done(stage: str, **what: Any) -> None:
        nonlocal began
        now = time.perf_counter()
        print(json.dumps({"stage": stage, "seconds": round(now - began, 4), **what}), flush=True)
        began = time.perf_counter()

    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    done("import")
    try:
        devices = jax.local_devices()
    except Exception as error:
        done("failed", error=f"{type(error).__name__}: {error}")
        return
    memory = []
    for device in devices:
        try:
            memory.append((device.memory_stats() or {}).get("bytes_limit"))
        except Exception:  # some platforms don't report it
            memory.append(None)
    done("devices", platform=devices[0].platform, kinds=[d.device_kind for d in devices], memory=memory)
    try:
        x = jnp.ones((256, 256))
        right = float(jax.jit(lambda x: (x @ x).sum())(x)) == 256.0**3
        done("compile", right=right)

        size = _MIB // 4
        mesh = jax.make_mesh((len(devices),), ("device",), devices=devices)
        split = NamedSharding(mesh, PartitionSpec("device"))
        numbers = jax.device_put(np.repeat(np.arange(len(devices), dtype=np.float32)[:, None], size, 1), split)
        summed = jax.jit(
            jax.shard_map(
                lambda x: jax.lax.psum(x, "device"), mesh=mesh, in_specs=split.spec, out_specs=PartitionSpec()
            )
        )
        right = bool((np.asarray(summed(numbers)) == sum(range(len(devices)))).all())
        first = time.perf_counter() - began
        times = []
        for _ in range(5):
            start = time.perf_counter()
            jax.block_until_ready(summed(numbers))
            times.append(time.perf_counter() - start)
        done("sum", right=right, bytes=_MIB, first=round(first, 4), again=sorted(times)[2])
    except Exception as error:
        done("failed", error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
