"""Names of GPUs and of machines that have them, and what is known of each model."""

from __future__ import annotations

import re

import pytest

from replicax.gpu.cloud_machines import MACHINES
from replicax.gpu.gpu_models import MODELS, SOURCES, is_gpu_topology, model_of, parse_cluster
from replicax.planning.chip_specs import CHIPS, MEMORY_FRACTION, chip_of


@pytest.mark.parametrize(
    ("name", "model", "hosts", "gpus"),
    [
        ("h100:16x8", "h100", 16, 8),
        ("h100:8", "h100", 1, 8),
        ("NVIDIA-H100:2x4", "h100", 2, 4),
        ("a100_80gb:1", "a100-80gb", 1, 1),
        ("RTX-4090:2", "rtx4090", 1, 2),
        ("gb200:36x4", "gb200", 36, 4),
        ("a3-megagpu-8g:16", "h100", 16, 8),
        ("p5.48xlarge", "h100", 1, 8),
        ("ND_H100_v5:4", "h100", 4, 8),
        ("a2-megagpu-16g", "a100-40gb", 1, 16),
        ("g5.12xlarge:3", "a10g", 3, 4),
    ],
)
def test_names(name: str, model: str, hosts: int, gpus: int) -> None:
    found, *shape = parse_cluster(name)
    assert (found.name, shape) == (model, [hosts, gpus])
    assert is_gpu_topology(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h1000:8", r"'h1000:8' is no cluster of GPUs: no GPU is called 'h1000'; did you mean h100.*known: a100-40gb,"),
        ("v100:8", r"no GPU is called 'v100'; did you mean h100\? known: .*; TPU"),
        ("a100:8", r"did you mean a100-40gb or a100-80gb\?"),
        ("p5.48xlagre", r"of machines, p5.48xlarge and .* sound like it"),
        ("h100", r"expected hosts x GPUs of each, such as 'h100:2x8', or the GPUs of one host, such as 'h100:8'"),
        ("h100:0x8", r"expected hosts x GPUs of each"),
        ("h100:1x2x8", r"expected hosts x GPUs of each"),
        ("h100:16", r"a host has at most 8 h100 GPUs, got 16; for 16 GPUs write 'h100:2x8'"),
        ("gb200:72", r"a host has at most 4 gb200 GPUs, got 72; for 72 GPUs write 'gb200:18x4'"),
        ("gb200:20x4", r"NVLink joins 18 hosts of gb200, and 20 hosts do not fill whole domains.*'gb200:36x4'"),
        ("a3-megagpu-8g:2x8", r"a machine with 8 h100 GPU\(s\); say how many machines, such as 'a3-megagpu-8g:2'"),
    ],
)
def test_names_that_mean_nothing(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_cluster(name)


@pytest.mark.parametrize("name", ["v5p:4x4x4", "v5e:16x16", "tpu7x:2x2x1", "v5p-128", "v6e:2x2"])
def test_names_of_tpus_are_not_of_gpus(name: str) -> None:
    assert not is_gpu_topology(name)


def test_machines_have_models_that_fit() -> None:
    for name, (model, gpus) in MACHINES.items():
        assert name == name.lower()
        assert 1 <= gpus <= MODELS[model].per_host, name


@pytest.mark.parametrize("name", MODELS)
def test_what_is_known_of_a_model(name: str) -> None:
    model, chip = MODELS[name], CHIPS[name]
    assert set(model.sources) <= set(SOURCES)
    assert model_of(model.device_kind) is model
    assert (
        chip.flops == model.peaks["bf16"] == 2 * model.peaks["tf32"] or abs(chip.flops / model.peaks["tf32"] - 2) < 0.05
    )
    assert model.peaks["bf16"] > model.peaks["f32"] >= model.peaks["f64"]
    narrow = ["s8", "f8"] if model.capability >= (8, 9) else ["s8"]
    assert all(model.peaks[dtype] / model.peaks["bf16"] > 1.99 for dtype in narrow)  # half the bits, twice the speed
    assert ("f8" in model.peaks) == ("f8" in narrow)
    assert chip.link * chip.links == pytest.approx(model.link)
    assert chip.network > 0
    assert chip.sources
    # Float32 without tensor cores: two FLOPs for each lane and cycle, within what clocks differ by between data sheets.
    lanes = int(re.search(r"fpus_per_core: (\d+)", model.target_config())[1])
    assert 2 * lanes * model.sms * model.clock * 1e9 == pytest.approx(model.peaks["f32"], rel=0.15)


def test_a_program_may_use_three_quarters_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MEMORY_FRACTION, raising=False)
    assert chip_of("NVIDIA H100 80GB HBM3").usable == 0.75 * MODELS["h100"].memory
    monkeypatch.setenv(MEMORY_FRACTION, "0.95")
    assert chip_of("NVIDIA H100 80GB HBM3").usable == 0.95 * MODELS["h100"].memory
    assert chip_of("cpu") is None
    assert chip_of("TPU v5p").name == "v5p"
