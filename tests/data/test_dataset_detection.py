"""Which dataset is whose is seen by the names of its classes; what is done with it, `make integrations` tests."""

from __future__ import annotations

import sys
import types

import grain
import numpy as np
import pytest

from replicax.integrations.converted_dataset import Adapted, adapted


def class_of(module: str, name: str, *bases: type) -> type:
    return type(name, bases, {"__module__": module, "__qualname__": name})


TORCH = class_of("torch.utils.data.dataset", "Dataset")
TORCH_ITERABLE = class_of("torch.utils.data.dataset", "IterableDataset", TORCH)


@pytest.mark.parametrize(
    ("cls", "integration"),
    [
        (TORCH, "torch_data"),
        (class_of("my.code", "Pictures", TORCH), "torch_data"),
        (class_of("my.code", "Loader", class_of("torch.utils.data.dataloader", "DataLoader")), "torch_data"),
        (class_of("x", "_BatchDataset", class_of("tensorflow.python.data.ops.dataset_ops", "DatasetV2")), "tf_data"),
        (class_of("datasets.arrow_dataset", "Dataset"), "hugging_face"),
        # Hugging Face's is a subclass of PyTorch's where that is installed.
        (class_of("datasets.iterable_dataset", "IterableDataset", TORCH_ITERABLE), "hugging_face"),
        (class_of("datasets.dataset_dict", "DatasetDict", dict), "hugging_face"),
    ],
)
def test_whose_it_is(monkeypatch, cls, integration) -> None:
    result = Adapted([np.zeros(2)], 1)
    module = types.ModuleType(integration)
    module.adapt = lambda dataset: result if type(dataset) is cls else None
    monkeypatch.setitem(sys.modules, f"replicax.integrations.{integration}", module)
    assert adapted(cls()) is result


@pytest.mark.parametrize(
    "dataset",
    [
        [np.zeros(2)],
        {"x": np.zeros(2)},
        None,
        np.zeros(2),
        grain.MapDataset.range(3),
        class_of("datasets", "Dataset")(),  # somebody's own module of that name
        class_of("torch.nn.modules.module", "Module")(),
        class_of("torch", "Tensor")(),
        TORCH,  # the class itself
    ],
    ids=lambda dataset: type(dataset).__name__,
)
def test_what_is_nobodys(dataset) -> None:
    assert adapted(dataset) is None
    assert not {"torch", "tensorflow", "datasets"} & set(sys.modules)
