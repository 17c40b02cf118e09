"""The suite's machine: eight fake CPU devices, no network, and real data only where somebody has some."""

import os
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # for the commands that tests start, too
os.environ["HF_HUB_OFFLINE"] = "1"

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)  # before the first use of a device

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """The directory whose data/ holds real data sets and T5's tokenizer; without it the test is skipped."""
    directory = Path(os.environ.get("PIPEJAX_SHARED") or REPOSITORY.parent / "shared")
    if not (directory / "data").is_dir():
        pytest.skip(f"no real data: {directory / 'data'} is no directory (PIPEJAX_SHARED names another)")
    return directory
