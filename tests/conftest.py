"""One thread, no network, fixed seeds: what every test may rely on."""

from __future__ import annotations

import os

# Before transformers is imported anywhere: a test that reaches for the hub must fail, not wait.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# The same examples in every run: a failure here can be repeated by anybody.
settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped, with that reason in the summary, where there is no GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
