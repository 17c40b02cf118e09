"""Small steps to save, and functions that make saving or reading fail."""

import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint
import pytest

from pipejax.checkpoint import Store
from pipejax.config import Config

CONFIG = Config(name="numbers")


def tree(value: float) -> dict[str, Any]:
    """The items of a step."""
    return {"params": {"a": jnp.full((64, 8), value), "b": {"c": jnp.arange(5.0) + value}}}


def save_all(store: Store, *steps: int) -> None:
    """Saves steps in the background; each step has its number as its value."""
    for step in steps:
        assert store.save(step, tree(float(step)), config=CONFIG, metadata={"score": [step]})
    assert store.close()


class Failing:
    """A background write that ends with an error when it is awaited."""

    def __init__(self, number: int) -> None:
        self.number = number

    def result(self, timeout: float | None = None) -> None:
        raise OSError(self.number, os.strerror(self.number))


def fail_with(number: int, monkeypatch: pytest.MonkeyPatch, *, times: int = 1) -> None:
    """Makes the writing of arrays fail with an error number for the next saved items."""
    handler = orbax.checkpoint.PyTreeCheckpointHandler
    original, left = handler.async_save, [times]

    async def async_save(self: Any, *args: Any, **kwargs: Any) -> Any:
        writes = await original(self, *args, **kwargs)
        if left[0] > 0:
            left[0] -= 1
            return [*(writes or []), Failing(number)]
        return writes

    monkeypatch.setattr(handler, "async_save", async_save)


def flip(directory: Path) -> None:
    """Flips one bit of every byte of the arrays of a step. A single byte may not matter: some are never read."""
    for path in directory.rglob("d/*"):
        if path.is_file():
            path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
