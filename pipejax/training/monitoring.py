"""What is seen of a training run: where the time goes, the log's windows of steps, the examination of the dev split."""

import contextlib
import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pipejax.checkpoint import Best
from pipejax.checkpoint.fingerprint import digest, fingerprints
from pipejax.config import Config
from pipejax.data.core import Batch, Encoded, Example, encode, fixed_batches, pack_size
from pipejax.data.shapes import Shapes
from pipejax.data.tokenizer import Tokenizer
from pipejax.inference.evaluation import evaluate
from pipejax.inference.generator import Generator, texts
from pipejax.metrics import HEADLINES
from pipejax.system import distributed
from pipejax.system.errors import UserError
from pipejax.system.progress import Progress
from pipejax.training.costs import peak, training_flops
from pipejax.training.run_directory import RunDirectory
from pipejax.training.run_log import score_of

Array = jax.Array
SAMPLES = 3  # documents whose predictions each evaluation shows


class Clock:
    """Seconds by what they went to. What nothing else is named for is "step": the devices are at work then."""

    def __init__(self) -> None:
        """Starts now."""
        self.totals: dict[str, float] = defaultdict(float)
        self._named: dict[str, float] = defaultdict(float)
        self._since = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Counts the time of a block; blocks do not nest."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._named[name] += time.perf_counter() - begun

    def lap(self) -> dict[str, float]:
        """Seconds since the last lap, which add up to the time that passed."""
        now = time.perf_counter()
        lap = {name: self._named[name] for name in ("compile", "data", "checkpoint", "evaluation")}
        lap["step"] = max(now - self._since - sum(lap.values()), 0.0)
        self._named.clear()
        self._since = now
        for name, seconds in lap.items():
            self.totals[name] += seconds
        return lap


class Trace:
    """A profile of a few steps, for TensorBoard or Perfetto."""

    def __init__(self, directory: Path, *, first: int, steps: int) -> None:
        """Of `steps` steps (0: none) from step `first` on."""
        self.directory, self.first, self.steps, self._running = directory, first, steps, False

    def before(self, step: int) -> None:
        """Begins if it is time to."""
        if self.steps and step == self.first:
            jax.profiler.start_trace(self.directory)
            self._running = True

    def after(self, step: int, results: Any) -> None:
        """Ends with the last step, once the devices are through with it."""
        if self.steps and step == self.first + self.steps - 1:
            jax.block_until_ready(results)
            self.close()

    def close(self) -> None:
        """Writes what there is, if a trace is under way."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()


class Window:
    """The steps since the last log line; values stay on the device until then."""

    def __init__(
        self,
        config: Config,
        examples: int,
        log: Callable[[dict[str, Any]], None],
        progress: Progress,
        devices: Sequence[jax.Device],
        clock: Clock,
    ) -> None:
        """Empty; `examples` make an epoch."""
        assert config.model is not None
        self.examples, self.train, self.model = examples, config.train, config.model
        self.log, self.progress = log, progress
        self.clock, self.steps, self.bad = clock, list[tuple[int, Batch, dict[str, Array]]](), 0
        peaks = [peak(device) for device in devices]
        whole = config.train.freeze == "none" and not config.train.lora_rank
        known = config.train.dtype != "float32" and whole and all(peaks)
        self.peak = sum(p for p in peaks if p) if known else None

    def add(self, step: int, batch: Batch, metrics: dict[str, Array]) -> None:
        """One more step."""
        self.steps.append((step, batch._replace(arrays={}), metrics))

    def flush(self) -> dict[str, Any]:
        """Writes a line of metrics.jsonl over all steps since the last, and one for each step that was left out.

        Raises:
          UserError: `train.max_bad_steps` in a row were.
        """
        fetched = jax.device_get([metrics for _, _, metrics in self.steps])
        seconds = self.clock.lap()
        batches = [batch for _, batch, _ in self.steps]
        good = [metrics for metrics in fetched if metrics["good"]]
        tokens = np.asarray([m["tokens"] for m in good], np.float64)
        step, lengths = self.steps[-1][0], np.concatenate([batch.lengths for batch in batches])
        active = max(seconds["step"] + seconds["data"], 1e-9)
        values = {
            "event": "train",
            "step": step,
            "epoch": step * self.train.batch_size / self.examples,
            "loss": float(np.dot([m["loss"] for m in good], tokens) / max(tokens.sum(), 1)) if good else None,
            "grad_norm": float(good[-1]["grad_norm"]) if good else None,
            "learning_rate": float(fetched[-1]["learning_rate"]),
            "tokens": int(tokens.sum()),
            "source_tokens": int(lengths[:, 0].sum()),
            "bad_steps": len(fetched) - len(good),
            "cut_sources": sum(batch.cut_sources for batch in batches),
            "cut_targets": sum(batch.cut_targets for batch in batches),
            "examples_per_second": len(lengths) / active,
            "tokens_per_second": float(lengths.sum()) / active,
            "seconds": seconds,
        }
        if self.peak is not None:
            values["mfu"] = sum(training_flops(self.model, b.lengths) for b in batches) / active / self.peak
        self.log(values)
        judged, self.steps = self.steps, []
        for (step, batch, _), metrics in zip(judged, fetched, strict=True):
            self._judge(step, batch, metrics)
        return values

    def settle(self) -> None:
        """Waits until no more than one step is under way: whoever wants to stop need not wait for many."""
        if len(self.steps) > 1:
            jax.block_until_ready(self.steps[-2][2])

    def _judge(self, step: int, batch: Batch, metrics: dict[str, Any]) -> None:
        if metrics["good"]:
            self.bad = 0
            return
        self.bad += 1
        loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
        found = f"loss {loss}, gradient norm {norm}"
        self.log({"event": "left_out", "step": step, "loss": str(loss), "grad_norm": str(norm), "ids": batch.ids})
        self.progress.line(f"step {step}: {found}; the update was left out (examples {_few(batch.ids)})")
        if self.bad >= self.train.max_bad_steps:
            raise UserError(
                f"step {step}: found {found}, and none better in {self.bad} steps in a row (the last examples: "
                f"{', '.join(batch.ids)}); expected finite numbers at least once in train.max_bad_steps = "
                f"{self.train.max_bad_steps}; try a lower train.learning_rate, or look at the data"
            )


def _few(ids: list[str], most: int = 8) -> str:
    return ", ".join(ids[:most]) + (f" and {len(ids) - most} more" if len(ids) > most else "")


def bounded(config: Config, encoded: Sequence[Encoded]) -> Config:
    """The config with bounds of decoding that are no wider than these targets, and half as much again, call for.

    A model that has not learned to stop fills whatever it may, and its first evaluation would take minutes. What a
    `data.max_target` has cut tells no bound.
    """
    if not encoded or any(e.target_was_cut for e in encoded):
        return config

    def bound(most: int, needed: int) -> int:
        return min(most, needed + needed // 2 + 8)

    steps, rows = (max(int(getattr(e.target, axis).max()) + 1 for e in encoded) for axis in ("time", "row"))
    grid = dataclasses.replace(
        config.grid, time_max=bound(config.grid.time_max, steps), sub_max=bound(config.grid.sub_max, rows)
    )
    decode = dataclasses.replace(config.decode, max_length=bound(config.decode.max_length, steps))
    return dataclasses.replace(config, grid=grid, decode=decode)


class _Stopped(Exception):
    """Ends a decode between two batches."""


class Examiner:
    """Scores the dev split and keeps the best parameters apart."""

    def __init__(
        self,
        config: Config,
        loss: Callable[[Any, dict[str, np.ndarray]], tuple[Array, Array]],
        shapes: Shapes,
        dev: Any,
        tokenizer: Tokenizer,
        directory: RunDirectory,
        write: Callable[[dict[str, Any]], None],
    ) -> None:
        """Encodes the dev examples once; `loss` gives the summed loss and the token count of a batch."""
        self.config, self.loss, self.shapes, self.tokenizer, self.write = config, loss, shapes, tokenizer, write
        most = config.train.evaluate_examples
        self.examples: list[Example] = list(dev[:most] if most else dev)
        assert config.model is not None
        self.encoded = [encode(e, tokenizer, config, config.model) for e in self.examples]
        self.generator: Generator | None = None
        self.best = Best(directory.path / "best", config) if self.examples else None
        self.highest, self.without_better = [-np.inf, -np.inf], 0
        for line in directory.logged("evaluation"):
            self._count(score_of(line))
        self.highest, self.without_better = distributed.same([self.highest, self.without_better])
        # No more at once than a training step has: what fits there fits here.
        part = config.train.batch_size // config.train.accumulate
        self.parts = dataclasses.replace(config.train, batch_size=part, pack=pack_size(config.train))

    @property
    def lost_patience(self) -> bool:
        """Whether `train.patience` evaluations in a row were no better than the best."""
        return 0 < self.config.train.patience <= self.without_better

    def evaluate(self, step: int, params: Any, progress: Progress, stopped: Callable[[], bool]) -> bool:
        """Dev loss and quality of decoding with the trained strategy; the best by score, then loss, is kept.

        `stopped` is asked before and after each batch: once it says True the evaluation is given up, and leaves nothing
        behind. The line in the log comes last: who is killed before it evaluates again, so no best step is missed.

        Returns:
          whether the evaluation came to its end.
        """
        if stopped():
            return False
        if self.generator is None:
            self.generator = Generator(bounded(self.config, self.encoded), params, self.tokenizer)
        else:
            self.generator.programs.set_params(params)

        def tick(count: int) -> None:
            if stopped():
                raise _Stopped

        try:
            size = self.config.decode.batch_size
            values, records = evaluate(self.generator, self.examples, batch_size=size, tick=tick)
        except _Stopped:
            return False
        finally:
            self.generator.programs.forget_params()  # training needs the room
        loss = self._dev_loss(params, stopped)
        if loss is None:
            return False
        headline = HEADLINES[values["metric"]]
        progress.line(
            f"step {step}: dev loss {loss:.4f}, {headline} {values[headline]:.2f}, {values['steps']:.1f} steps"
        )
        samples: list[dict[str, Any]] = [
            {"id": example.id, "gold": list(example.targets), "predicted": texts(record)}
            for example, record in zip(self.examples[:SAMPLES], records, strict=False)
        ]
        for sample in samples:
            gold, predicted = (_few(sample[key]) or "(nothing)" for key in ("gold", "predicted"))
            progress.line(f"  {sample['id']}: {predicted[:200]}  (expected: {gold[:200]})")
        score = tuple(distributed.same([values[headline], -loss]))
        if self.best is not None:
            self.best.offer(step, score, params)
        params_fp = digest(fingerprints(params))
        line = {"event": "evaluation", "step": step, "dev_loss": loss, **values, "params_fp": params_fp}
        used = self.generator.config
        bounds = {"time_max": used.grid.time_max, "sub_max": used.grid.sub_max, "max_length": used.decode.max_length}
        self.write(line | {"bounds": bounds, "samples": samples})
        self._count(score)
        return True

    def _count(self, score: Sequence[float]) -> None:
        better = [*score] > self.highest
        self.highest, self.without_better = ([*score], 0) if better else (self.highest, self.without_better + 1)

    def _dev_loss(self, params: Any, stopped: Callable[[], bool]) -> float | None:
        sums = []
        for batch in fixed_batches(self.encoded, self.parts, self.shapes):
            if stopped():
                return None
            sums.append(jax.device_get(self.loss(params, batch.arrays)))
        totals, counts = np.asarray(sums, np.float64).T
        return float(totals.sum() / max(counts.sum(), 1))
