"""Keeps the best step of a run: on disk, or in memory as long as the disk cannot be written."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import jax
import numpy as np

from pipejax.checkpoint.manifest import on_host
from pipejax.checkpoint.store import Store
from pipejax.config import Config
from pipejax.model import auxiliary
from pipejax.system import Tree, distributed


class Best:
    """Saves the parameters with the highest score. All processes must make the same calls."""

    def __init__(self, directory: Path, config: Config, about: Mapping[str, str] = MappingProxyType({})) -> None:
        """Reads the score of the step that an earlier part of the run saved, if there is one.

        Args:
          directory: best/ of the run directory.
          config: the resolved config.
          about: metadata saved with each step.
        """
        self.config, self.about = config, dict(about)
        self.store = Store(directory, keep=1, writable=True)
        found = self.store.newest_metadata()
        # Score of the step on disk; () without a step.
        self.score: tuple[float, ...] = tuple((found or {}).get("score", ()))
        self._waiting: tuple[int, tuple[float, ...], Tree] | None = None

    def offer(self, step: int, score: tuple[float, ...], params: Tree) -> None:
        """Saves the parameters if their score is the highest so far.

        If the save fails, a copy on the host waits, and the next `offer` or `settle` tries again.
        """
        waiting = self._waiting
        if score > max(self.score, waiting[1] if waiting else ()):
            self._waiting = None  # dropped first, because two copies would take twice the memory
            if self._save(step, score, params):
                return
            if not distributed.several():  # with several processes, no process holds all parameters
                self._waiting = (step, score, jax.tree.map(np.array, params))  # a copy, as training reuses the buffers
        else:
            self.settle()

    def settle(self) -> bool:
        """Saves the waiting parameters, if there are any. Returns False if that fails; the log then has the reason."""
        if self._waiting is None:
            return True
        step, score, params = self._waiting
        if self._save(step, score, jax.device_put(params, on_host())):
            self._waiting = None
        return self._waiting is None

    def close(self) -> bool:
        """Saves waiting parameters and closes the store. Returns False if the best step is not on disk."""
        done = self.settle()
        return self.store.close() and done

    def _save(self, step: int, score: tuple[float, ...], params: Tree) -> bool:
        metadata = {**self.about, "score": list(score)}
        whole, own = auxiliary.split(params)
        items = {"params": whole} | ({} if own is None else {auxiliary.ITEM: own})
        done = self.store.save(step, items, config=self.config, metadata=metadata, wait=True)
        if done:
            self.score = score
        return done
