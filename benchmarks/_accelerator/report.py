"""The results as Markdown: what was measured on which devices, in tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Found = dict[str, Any]


def markdown(found: Found, picture: str) -> str:
    """All tables, each only if there is something in it."""
    device = found["device"]
    sections = [
        f"# {device['count']} × {device['kind']}",
        _about(found),
        f"![step times, predictions, memory and bandwidth]({picture})",
        _section("Checks", _checks(found)),
        _section("Time of a step, beside the same by hand", _training(found)),
        _section("Predicted and measured", _plans(found)),
        _section("Sums over all devices", _sums(found)),
        _section("The per-replica executor, a save, and a run that goes on", _runs(found)),
        _section("Parts that did not end well", _parts(found)),
    ]
    return "\n\n".join(filter(None, sections)) + "\n"


def label(found: Found) -> str:
    """What stands above everything: whether this is a measurement of an accelerator."""
    if found["device"].get("emulated"):
        return "EMULATED CPU DEVICES: a rehearsal with small models; says nothing about GPUs or TPUs"
    return f"measured on {found['device']['count']} × {found['device']['kind']}"


def _about(found: Found) -> str:
    device, machine = found["device"], found["device"]["machine"]
    state = "**Interrupted: some parts are missing.** " if found["interrupted"] else ""
    memory = f", {device['memory'] / 2**30:.1f} GiB each" if device["memory"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in machine.items())
    software = " ".join(device["software"])
    return (
        f"**{label(found)}.** {state}{device['count']} × {device['kind']} ({device['platform']}){memory}; {versions}; "
        f"{software}. Models: {found.get('size', 'small')}. Took {found.get('seconds', 0):.0f} s."
    )


def _checks(found: Found) -> str:
    rows = [
        (row["name"], "pass" if row["passed"] else "**FAIL**", _number(row["difference"], "{:.1e}"), row["words"])
        for row in found.get("checks", ())
    ]
    return _table(("Replicax on all devices, against plain JAX on one", "", "difference", ""), rows)


def _training(found: Found) -> str:
    rows = []
    for row in found.get("training", ()):
        low, high = row["ratio_95"]
        way = f"run_steps({row['steps']})" if "steps" in row else row["way"]
        times = (f"{row['a_ms']:#.4g} ms", f"{row['b_ms']:#.4g} ms")
        rate = f"{row['examples_per_second']:,.0f}"
        rows.append((row["title"], row["devices"], way, *times, f"{row['ratio']:.3f}", f"{low:.3f}–{high:.3f}", rate))
    return _table(("model", "devices", "way", "Replicax", "by hand", "ratio", "95%", "examples a second"), rows)


def _plans(found: Found) -> str:
    rows = []
    peaks = {(r["model"], r["devices"], r["side"]): r["peak"] for r in found.get("memory", ())}
    for row in found.get("plans", ()):
        ours, theirs = (peaks.get((row["model"], row["devices"], side)) for side in ("replicax", "hand"))
        predicted, measured = row["predicted_s"], row["measured_s"]
        used = None
        if row["model_flops"] and row["peak_flops"] and not found["device"].get("emulated"):
            used = row["model_flops"] / row["peak_flops"] / measured
        rows.append(
            (
                row["title"],
                row["devices"],
                _number(predicted and 1e3 * predicted, "{:#.4g} ms"),
                f"{1e3 * measured:#.4g} ms",
                _number(predicted and measured / predicted, "{:.2f}"),
                _number(used, "{:.1%}"),
                _size(row["predicted_bytes"]),
                _size(ours),
                _size(theirs),
            )
        )
    head = ("model", "devices", "predicted", "measured", "measured / predicted", "MFU", "memory, predicted")
    words = [
        f"{row['title']} on {row['devices']}: no plan: {row['words']}" for row in found.get("plans", ()) if row["words"]
    ]
    return "\n\n".join([_table((*head, "peak, Replicax", "peak, by hand"), rows), *words]).strip()


def _sums(found: Found) -> str:
    rows = []
    for row in found.get("sums", ()):
        low, high = row["step_over_jax_95"]
        share = None if not row["link"] else row["bandwidth"] / row["link"]
        step = f"{row['step_over_jax']:.3f} ({low:.3f}–{high:.3f})"
        rows.append(
            (
                _size(row["bytes"]),
                f"{1e6 * row['seconds']:,.1f} µs",
                _number(row["predicted_s"] and 1e6 * row["predicted_s"], "{:,.1f} µs"),
                f"{row['bandwidth'] / 1e9:,.2f} GB/s",
                _number(share, "{:.0%}"),
                step,
            )
        )
    return _table(("float32", "a sum", "predicted", "bandwidth", "of the links", "a step that sums / JAX"), rows)


def _runs(found: Found) -> str:
    lines = []
    for row in found.get("exact", ()):
        verdict = "pass" if row["passed"] else "**FAIL**"
        lines.append(
            f"- The per-replica executor differs by {row['difference']:.1e} after three steps ({verdict}); a step "
            f"takes {1e3 * row['exact_s']:.0f} ms, compiled {1e3 * row['compiled_s']:.1f} ms."
        )
    for row in found.get("checkpoint", ()):
        bits, later = (
            ("the same bits" if same else "**OTHER BITS**") for same in (row["same_bits"], row["same_bits_later"])
        )
        where = "in the same process" if row["step"] == "save" else "in another process"
        if row["step"] == "save":
            lines.append(
                f"- A save of {_size(row['bytes'])} stopped the run for {1e3 * row['stopped_s']:.0f} ms, and was "
                f"written after {1e3 * row['written_s']:.0f} ms."
            )
        lines.append(f"- Restored {where} in {1e3 * row['restored_s']:.0f} ms: {bits}; five steps later: {later}.")
    return "\n".join(lines)


def _parts(found: Found) -> str:
    rows = [(p["name"], p["state"], f"{p['seconds']} s", p["words"]) for p in found["parts"] if p["state"] != "done"]
    return _table(("part", "", "after", ""), rows)


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n{text}" if text else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    if not lines:
        return ""
    return "\n".join(["| " + " | ".join(head) + " |", "| --- " * len(head) + "|", *lines])


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _size(count: float | None) -> str:
    if count is None:
        return "–"
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
