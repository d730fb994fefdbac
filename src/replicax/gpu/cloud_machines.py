"""Clouds' names of machines with GPUs: which GPUs each has, and how many.

Sources: https://cloud.google.com/compute/docs/gpus, https://aws.amazon.com/ec2/instance-types and
https://learn.microsoft.com/azure/virtual-machines/sizes/overview (GPU accelerated).
"""

from __future__ import annotations

MACHINES: dict[str, tuple[str, int]] = {
    # Google Cloud
    **{f"a2-highgpu-{n}g": ("a100-40gb", n) for n in (1, 2, 4, 8)},
    "a2-megagpu-16g": ("a100-40gb", 16),
    **{f"a2-ultragpu-{n}g": ("a100-80gb", n) for n in (1, 2, 4, 8)},
    **{f"a3-highgpu-{n}g": ("h100", n) for n in (1, 2, 4, 8)},
    "a3-megagpu-8g": ("h100", 8),
    "a3-edgegpu-8g": ("h100", 8),
    "a3-ultragpu-8g": ("h200", 8),
    "a4-highgpu-8g": ("b200", 8),
    "a4x-highgpu-4g": ("gb200", 4),
    **{f"g2-standard-{cores}": ("l4", 1) for cores in (4, 8, 12, 16, 32)},
    "g2-standard-24": ("l4", 2),
    "g2-standard-48": ("l4", 4),
    "g2-standard-96": ("l4", 8),
    # AWS
    "p4d.24xlarge": ("a100-40gb", 8),
    "p4de.24xlarge": ("a100-80gb", 8),
    "p5.4xlarge": ("h100", 1),
    "p5.48xlarge": ("h100", 8),
    "p5e.48xlarge": ("h200", 8),
    "p5en.48xlarge": ("h200", 8),
    "p6-b200.48xlarge": ("b200", 8),
    "p6e-gb200.36xlarge": ("gb200", 4),
    **{f"g5.{size}xlarge": ("a10g", 1) for size in ("", 2, 4, 8, 16)},
    "g5.12xlarge": ("a10g", 4),
    "g5.24xlarge": ("a10g", 4),
    "g5.48xlarge": ("a10g", 8),
    **{f"g6.{size}xlarge": ("l4", 1) for size in ("", 2, 4, 8, 16)},
    "g6.12xlarge": ("l4", 4),
    "g6.24xlarge": ("l4", 4),
    "g6.48xlarge": ("l4", 8),
    **{f"g6e.{size}xlarge": ("l40s", 1) for size in ("", 2, 4, 8, 16)},
    "g6e.12xlarge": ("l40s", 4),
    "g6e.24xlarge": ("l40s", 4),
    "g6e.48xlarge": ("l40s", 8),
    # Azure: the names of the series, and of their largest sizes
    "nd_a100_v4": ("a100-40gb", 8),
    "standard_nd96asr_v4": ("a100-40gb", 8),
    "ndm_a100_v4": ("a100-80gb", 8),
    "standard_nd96amsr_a100_v4": ("a100-80gb", 8),
    "nd_h100_v5": ("h100", 8),
    "standard_nd96isr_h100_v5": ("h100", 8),
    "nd_h200_v5": ("h200", 8),
    "standard_nd96isr_h200_v5": ("h200", 8),
    "nd_gb200_v6": ("gb200", 4),
    "standard_nd128isr_ndr_gb200_v6": ("gb200", 4),
}
"""By name, in lower case: the model's name, and how many GPUs."""
