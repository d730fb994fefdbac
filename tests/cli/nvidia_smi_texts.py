"""Texts as ``nvidia-smi`` prints them, for machines that are not here.

The formats are those of drivers 535 to 590, as reports of users have them: ``-q -x`` by nvsmi_device_v12.dtd and
nvsmi_device_v13.dtd (test data of influxdata/telegraf), ``topo -m`` (NVIDIA/nccl, issue 1505), and ``topo -p2p r`` with
tabs and a space before each row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

HEAD = '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_{dtd}.dtd">\n'
INSTANCE = "\t\t\t<mig_device>\n\t\t\t\t<index>{i}</index>\n\t\t\t</mig_device>\n"
GPU = """\
\t<gpu id="00000000:{i:02X}:00.0">
\t\t<product_name>{name}</product_name>
\t\t<persistence_mode>Enabled</persistence_mode>
\t\t<mig_mode>
\t\t\t<current_mig>{mig}</current_mig>
\t\t\t<pending_mig>{pending}</pending_mig>
\t\t</mig_mode>
\t\t<mig_devices>
{instances}\t\t</mig_devices>
\t\t<gpu_recovery_action>{action}</gpu_recovery_action>
\t\t<pci>
\t\t\t<pci_gpu_link_info>
\t\t\t\t<link_widths>
\t\t\t\t\t<max_link_width>16x</max_link_width>
\t\t\t\t\t<current_link_width>{lanes}x</current_link_width>
\t\t\t\t</link_widths>
\t\t\t</pci_gpu_link_info>
\t\t</pci>
\t\t<clocks_event_reasons>
\t\t\t<clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
\t\t\t<clocks_event_reason_hw_thermal_slowdown>{hot}</clocks_event_reason_hw_thermal_slowdown>
\t\t</clocks_event_reasons>
\t\t<fb_memory_usage>
\t\t\t<total>{total} MiB</total>
\t\t\t<reserved>450 MiB</reserved>
\t\t\t<used>{used} MiB</used>
\t\t\t<free>1 MiB</free>
\t\t</fb_memory_usage>
\t\t<compute_mode>{compute}</compute_mode>
\t\t<ecc_errors>
\t\t\t<volatile>
\t\t\t\t<sram_correctable>0</sram_correctable>
\t\t\t\t<sram_uncorrectable_parity>0</sram_uncorrectable_parity>
\t\t\t\t<dram_uncorrectable>{uncorrectable}</dram_uncorrectable>
\t\t\t</volatile>
\t\t</ecc_errors>
\t\t<remapped_rows>
\t\t\t<remapped_row_failure>{failure}</remapped_row_failure>
\t\t</remapped_rows>
\t\t<fabric>
\t\t\t<state>{state}</state>
\t\t\t<status>{status}</status>
\t\t</fabric>
\t</gpu>
"""
USUAL = {
    "name": "NVIDIA H100 80GB HBM3",
    "mig": "Disabled",
    "pending": "Disabled",
    "parts": 0,
    "action": "None",
    "lanes": 16,
    "hot": "Not Active",
    "total": 81559,
    "used": 4,
    "compute": "Default",
    "uncorrectable": 0,
    "failure": "No",
    "state": "Completed",
    "status": "Success",
}
LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def report(
    *gpus: dict[str, object], driver: str = "550.54.15", cuda: str = "12.4", count: int = 0, dtd: str = "v12"
) -> str:
    """``nvidia-smi -q -x``: the GPUs, which differ from :data:`USUAL` in what is given, or ``count`` usual ones."""
    parts = [f"\t<driver_version>{driver}</driver_version>\n\t<cuda_version>{cuda}</cuda_version>\n"]
    for i, differs in enumerate(gpus or [{}] * count):
        values: dict[str, object] = {**USUAL, **differs}
        number = int(str(values["parts"]))
        instances = "".join(INSTANCE.format(i=n) for n in range(number)) or "\t\t\tNone\n"
        parts.append(GPU.format(i=i + 1, instances=instances, **values))
    return HEAD.format(dtd=dtd) + "<nvidia_smi_log>\n" + "".join(parts) + "</nvidia_smi_log>\n"


def topology(count: int, link: Callable[[int, int], str], cards: Sequence[str] = ()) -> str:
    """``nvidia-smi topo -m``, on a terminal: with an underlined head."""
    names = [f"GPU{i}" for i in range(count)] + [f"NIC{i}" for i in range(len(cards))]
    lines = ["\x1b[4m\t" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m"]
    for i in range(count):
        words = [" X " if i == j else link(min(i, j), max(i, j)) for j in range(count)] + ["PXB" for _ in cards]
        lines.append(f"GPU{i}\t" + "\t".join(words) + "\t0-47,96-143\t0\t\tN/A")
    for i, _ in enumerate(cards):
        lines.append(f"NIC{i}\t" + "\t".join(["PXB"] * count + [" X "] * len(cards)))
    text = "\n".join(lines) + "\n" + LEGEND
    return text + ("\nNIC Legend:\n\n" + "\n".join(f"  NIC{i}: {c}" for i, c in enumerate(cards)) if cards else "")


def peers(count: int, word: str = "OK") -> str:
    """``nvidia-smi topo -p2p r``."""
    lines = [" \t" + "\t".join(f"GPU{i}" for i in range(count)) + "\t"]
    for i in range(count):
        lines.append(f" GPU{i}\t" + "\t".join("X" if i == j else word for j in range(count)) + "\t")
    return "\n".join(lines) + "\n\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n  CNS  = Chipset not supported\n"
