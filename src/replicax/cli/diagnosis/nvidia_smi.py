"""Runs ``nvidia-smi`` with a deadline, and parses its report and tables.

Its output has no fixed format: missing or unknown entries become ``None`` or are left out, and never raise.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

from replicax.cli.diagnosis.check_runner import run_process

COMMAND = "nvidia-smi"
_MIB = 2**20
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_NOTHING = {"", "N/A", "[N/A]", "None", "Not Supported", "Requested functionality has been deprecated"}


@dataclasses.dataclass(frozen=True)
class Output:
    """The result of a command."""

    text: str  # its output, including errors
    code: int | None  # its exit code; ``None`` if it was killed, or does not exist
    is_there: bool = True  # whether the command exists


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU in the report ``nvidia-smi -q -x``."""

    name: str  # of the product
    total: int | None = None  # its memory, in bytes; ``None`` if unknown
    used: int | None = None  # of that
    mig: bool = False  # whether MIG is on
    mig_changes: bool = False  # whether a reset will switch MIG on or off
    instances: int = 0  # the number of MIG instances
    # The state of the NVSwitch fabric and its status, such as ``"Completed, Success"``; empty if it has none.
    fabric: str = ""
    compute_mode: str = ""  # such as ``"Default"`` or ``"Prohibited"``
    problems: tuple[str, ...] = ()  # faults that the driver reports, in a few words each
    lanes: int | None = None  # of PCIe, now; ``None`` if unknown
    most_lanes: int | None = None  # at most


@dataclasses.dataclass(frozen=True)
class Report:
    """The report ``nvidia-smi -q -x``."""

    driver: str  # its version, such as ``"550.54.15"``
    cuda: str  # the newest CUDA that it runs, such as ``"12.4"``
    gpus: tuple[Gpu, ...]  # all GPUs of the machine, in the order of their PCI addresses


@dataclasses.dataclass(frozen=True)
class Links:
    """The tables ``nvidia-smi topo -m`` and ``nvidia-smi topo -p2p r``."""

    # Of each pair of GPUs by their numbers, the smaller first: ``"NV18"``, ``"PIX"``, ``"SYS"``, ``"OK"``, ….
    between: Mapping[tuple[int, int], str]
    cards: tuple[str, ...] = ()  # the names of the network cards in the table


def ask(arguments: Sequence[str], seconds: float) -> Output:
    """Run ``nvidia-smi`` with these arguments, for at most ``seconds``."""
    try:
        output, errors, code = run_process([COMMAND, *arguments], seconds)
    except OSError as error:
        return Output(error.strerror or str(error), None, is_there=False)
    return Output(output + errors, code)


def parsed_report(text: str) -> Report | None:
    """Parse the report ``nvidia-smi -q -x``; ``None`` if the text is not one.

    >>> gpu = "<gpu><product_name>NVIDIA L4</product_name></gpu>"
    >>> parsed_report(f"<nvidia_smi_log><driver_version>550.54</driver_version>{gpu}</nvidia_smi_log>").gpus[0].name
    'NVIDIA L4'
    """
    try:
        root = ElementTree.fromstring(text[max(0, text.find("<")) : text.rfind(">") + 1])
    except ElementTree.ParseError:
        return None
    if root.tag != "nvidia_smi_log":
        return None
    gpus = tuple(_gpu(element) for element in root.findall("gpu"))
    return Report(_text(root, "driver_version"), _text(root, "cuda_version"), gpus)


def parsed_links(text: str) -> Links:
    r"""Parse a table of ``nvidia-smi topo``: its rows and columns of GPUs.

    >>> parsed_links("        GPU0    GPU1    CPU Affinity\nGPU0     X      NV12    0-7\nGPU1    NV12     X      0-7")
    Links(between={(0, 1): 'NV12'}, cards=())
    """
    lines = [_ESCAPES.sub("", line).split() for line in text.splitlines()]
    columns: list[str] = []
    between: dict[tuple[int, int], str] = {}
    cards = {words[0].rstrip(":"): words[1] for words in lines if len(words) == 2 and words[0].startswith("NIC")}
    for words in lines:
        if not words or _number(words[0]) is None:
            continue
        if not columns:
            columns = words  # the head; ignores what follows the devices ("CPU Affinity")
            continue
        row = _number(words[0])
        for name, word in zip(columns, words[1:], strict=False):
            column = _number(name)
            if row is not None and column is not None and row < column:
                between[row, column] = word
    names = [name for name in columns if re.fullmatch(r"NIC\d+|mlx\d_\d+", name)]
    return Links(between, tuple(cards.get(name, name) for name in names))


def _gpu(element: ElementTree.Element) -> Gpu:
    current, pending = (_text(element, f"mig_mode/{when}_mig") for when in ("current", "pending"))
    fabric = [_text(element, f"fabric/{what}") for what in ("state", "status")]
    return Gpu(
        name=_text(element, "product_name") or "NVIDIA GPU",
        total=_bytes(_text(element, "fb_memory_usage/total")),
        used=_bytes(_text(element, "fb_memory_usage/used")),
        mig=current == "Enabled",
        mig_changes=bool(current and pending) and current != pending,
        instances=len(element.findall("mig_devices/mig_device")),
        fabric=", ".join(filter(None, fabric)) if fabric[0] else "",
        compute_mode=_text(element, "compute_mode"),
        problems=tuple(_problems(element)),
        lanes=first_number(_text(element, "pci/pci_gpu_link_info/link_widths/current_link_width")),
        most_lanes=first_number(_text(element, "pci/pci_gpu_link_info/link_widths/max_link_width")),
    )


def _problems(element: ElementTree.Element) -> list[str]:
    problems = []
    action = _text(element, "gpu_recovery_action")
    if action or _text(element, "gpu_reset_status/reset_required") == "Yes":
        problems.append(f"needs: {action.lower() or 'reset'}")
    if _text(element, "remapped_rows/remapped_row_failure") == "Yes":
        problems.append("has memory that can't be repaired")
    errors = element.find("ecc_errors/volatile")
    counts = [] if errors is None else [first_number(e.text or "") for e in errors if "uncorrectable" in e.tag]
    if total := sum(filter(None, counts)):
        problems.append(f"has had {total} uncorrectable memory error(s) since the driver was loaded")
    reasons = element.find("clocks_event_reasons")
    for reason in () if reasons is None else reasons:
        if reason.text == "Active" and re.search("hw_slowdown|thermal|power_brake", reason.tag):
            problems.append("is slowed down: " + reason.tag.removeprefix("clocks_event_reason_").replace("_", " "))
    return problems


def _text(element: ElementTree.Element, path: str) -> str:
    text = (element.findtext(path) or "").strip()
    return "" if text in _NOTHING else text


def _bytes(text: str) -> int | None:
    number = first_number(text)
    return None if number is None or not text.endswith("MiB") else number * _MIB


def first_number(text: str) -> int | None:
    """The number at the start of a text; ``None`` if there is none."""
    match = re.match(r"\d+", text)
    return int(match[0]) if match else None


def _number(name: str) -> int | None:
    """The number in ``"GPU3"``; ``None`` for other words."""
    match = re.fullmatch(r"GPU(\d{1,4})", name)
    return int(match[1]) if match else None
