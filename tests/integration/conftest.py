"""What the libraries print and warn of by themselves is not what is tested."""

from __future__ import annotations

import os
from collections.abc import Iterator

import jax
import pytest

import replicax

replicax.use_cpu_devices(8)
os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def _types_as_users_have_them() -> Iterator[None]:
    """Keras relies on promotion, which the other tests forbid."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # TensorFlow's own modules use what NumPy and Python have deprecated.
        item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorflow|keras|google"))
