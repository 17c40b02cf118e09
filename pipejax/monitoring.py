"""What is seen of a training run: the log's windows of steps, and the examination of the dev split."""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from pipejax.checkpoint import Store
from pipejax.config import Config
from pipejax.data.core import Example, encode, fixed_batches
from pipejax.evaluation import evaluate
from pipejax.fingerprint import digest, fingerprints
from pipejax.generate import Generator
from pipejax.metrics import HEADLINES
from pipejax.progress import Progress
from pipejax.run_directory import RunDirectory
from pipejax.tokenizer import Tokenizer

Array = jax.Array


class Window:
    """The steps since the last log line; values stay on the device until then."""

    def __init__(self, directory: RunDirectory, progress: Progress, rate: optax.Schedule, batch_size: int) -> None:
        """Empty."""
        self.directory, self.progress, self.rate, self.batch_size = directory, progress, rate, batch_size
        self.steps: list[dict[str, Array]] = []
        self.cut_sources = self.cut_targets = 0
        self.since = time.perf_counter()

    def pause(self, seconds: float) -> None:
        """Time that went elsewhere: it does not count as training."""
        self.since += seconds

    def add(self, step: int, metrics: dict[str, Array], cut_sources: int, cut_targets: int, *, flush: bool) -> None:
        """One more step; with `flush` a line of metrics.jsonl over all since the last."""
        self.steps.append(metrics)
        self.cut_sources += cut_sources
        self.cut_targets += cut_targets
        note = ""
        if flush:
            values = self.flush(step)
            note = f"loss {values['loss']:.4f}"
        self.progress.add(1, note)

    def flush(self, step: int) -> dict[str, Any]:
        """Writes the line up to this step."""
        fetched = jax.device_get(self.steps)
        seconds = time.perf_counter() - self.since
        tokens = np.asarray([m["tokens"] for m in fetched], np.float64)
        loss = float(np.dot([m["loss"] for m in fetched], tokens) / max(tokens.sum(), 1))
        values = {
            "event": "train",
            "step": step,
            "loss": loss,
            "grad_norm": float(fetched[-1]["grad_norm"]),
            "learning_rate": float(self.rate(step - 1)),
            "tokens": int(tokens.sum()),
            "cut_sources": self.cut_sources,
            "cut_targets": self.cut_targets,
            "examples_per_second": len(fetched) * self.batch_size / seconds,
            "tokens_per_second": float(tokens.sum()) / seconds,
        }
        self.directory.log_metrics(values)
        self.steps, self.cut_sources, self.cut_targets, self.since = [], 0, 0, time.perf_counter()
        return values


class Examiner:
    """Scores the dev split and keeps the best parameters apart."""

    def __init__(
        self,
        config: Config,
        loss: Callable[[Any, dict[str, np.ndarray]], tuple[Array, Array]],
        dev: Any,
        tokenizer: Tokenizer,
        directory: RunDirectory,
        log: Callable[[str], None],
    ) -> None:
        """Encodes the dev examples once; `loss` gives the summed loss and the token count of a batch."""
        self.config, self.loss, self.tokenizer, self.directory = config, loss, tokenizer, directory
        most = config.train.evaluate_examples
        self.examples: list[Example] = list(dev[:most] if most else dev)
        assert config.model is not None
        self.encoded = [encode(e, tokenizer, config, config.model) for e in self.examples]
        self.generator: Generator | None = None
        self.store = Store(directory.path / "best", keep=1, writable=True)
        best = self.store.newest(None, log=log, set_aside=True)
        self.best = tuple(best.metadata["score"]) if best else (-1.0, -np.inf)

    def evaluate(self, step: int, params: Any, progress: Progress) -> None:
        """Dev loss and quality of greedy decoding with the trained strategy; the best by score, then loss, is kept."""
        if self.generator is None:
            self.generator = Generator(self.config, params, self.tokenizer)
        else:
            self.generator.set_params(params)
        values, _ = evaluate(self.generator, self.examples, batch_size=self.config.decode.batch_size)
        loss = self._dev_loss(params)
        params_fp = digest(fingerprints(params))
        self.directory.log_metrics(
            {"event": "evaluation", "step": step, "dev_loss": loss, **values, "params_fp": params_fp}
        )
        headline = HEADLINES[values["metric"]]
        progress.line(
            f"step {step}: dev loss {loss:.4f}, {headline} {values[headline]:.2f}, {values['steps']:.1f} steps"
        )
        score = (values[headline], -loss)
        if score > self.best:
            self.best = score
            self.store.save(step, {"params": params}, config=self.config, metadata={"score": list(score)})

    def _dev_loss(self, params: Any) -> float:
        batches = fixed_batches(self.encoded, self.config.train.batch_size)
        sums = [self.loss(params, batch.arrays) for batch in batches]
        totals, counts = np.asarray(jax.device_get(sums), np.float64).T
        return float(totals.sum() / max(counts.sum(), 1))
