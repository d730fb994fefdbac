"""A compiler that hurries: what is tested is what programs compute, and not how fast.

Without these optimizations a small program compiles three times as fast. Later compilers have no such choice, and end
the process at flags that they do not know.
"""

import jax

HURRIED: dict[str, str] = {}
"""What to set in the environment of a process before it makes its devices."""

if jax.__version_info__ < (0, 11):
    HURRIED["XLA_FLAGS"] = (
        "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false "
        "--xla_cpu_parallel_codegen_split_count=1"
    )
