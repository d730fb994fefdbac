"""A compiler that hurries: what is tested is what programs compute, and not how fast.

Without these optimizations a small program compiles three times as fast on the oldest JAX, and in two thirds of the
time on the newest. A compiler ends the process at flags that it does not know.
"""

import jax

_FLAGS = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]

if jax.__version_info__ < (0, 11):
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")

HURRIED = {"XLA_FLAGS": " ".join(_FLAGS)}
"""What to set in the environment of a process before it makes its devices."""
