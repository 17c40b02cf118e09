"""The best step of a run, kept apart: on disk, or in memory until the disk takes it."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from pipejax.checkpoint.manifest import on_host
from pipejax.checkpoint.store import Store
from pipejax.config import Config
from pipejax.system import distributed


class Best:
    """The parameters of the highest score; all processes make the same calls."""

    def __init__(self, directory: Path, config: Config, about: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Takes up what an earlier part of the run has left there; `about` is saved with each step's score.

        Raises:
          UserError: the directory cannot be written.
        """
        self.config, self.about = config, dict(about)
        self.store = Store(directory, keep=1, writable=True)
        found = self.store.newest_metadata()
        self.score: tuple[float, ...] = tuple((found or {}).get("score", ()))  # of what is on disk
        self._waiting: tuple[int, tuple[float, ...], Any] | None = None

    def offer(self, step: int, score: tuple[float, ...], params: Any) -> None:
        """Saves the parameters if none have a higher score; if the disk does not take them, they wait for `settle`."""
        waiting = self._waiting
        if score > max(self.score, waiting[1] if waiting else ()):
            self._waiting = None  # two would take twice the memory
            if self._save(step, score, params):
                return
            if not distributed.several():  # else no process has all of it
                self._waiting = (step, score, jax.tree.map(np.array, params))  # training goes on in these buffers
        else:
            self.settle()

    def settle(self) -> bool:
        """Tries again what waits. False if something still does; the log then has a line about it."""
        if self._waiting is None:
            return True
        step, score, params = self._waiting
        if self._save(step, score, jax.device_put(params, on_host())):
            self._waiting = None
        return self._waiting is None

    def close(self) -> bool:
        """As `settle`, for the last time."""
        done = self.settle()
        return self.store.close() and done

    def _save(self, step: int, score: tuple[float, ...], params: Any) -> bool:
        metadata = {**self.about, "score": list(score)}
        done = self.store.save(step, {"params": params}, config=self.config, metadata=metadata, wait=True)
        if done:
            self.score = score
        return done
