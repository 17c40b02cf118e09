"""The view of a training run: its data at the start, where the time goes, the log's windows of steps."""

import contextlib
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from pipejax import methods
from pipejax.config import Config
from pipejax.data.batches import Batch
from pipejax.data.examples import Example
from pipejax.data.round_trip import describe_changes
from pipejax.data.tokenizer import Tokenizer
from pipejax.system.errors import UserError
from pipejax.system.progress import Progress
from pipejax.training.costs import peak
from pipejax.training.run_log import Line

Array = jax.Array
FEW = 0.05  # of the examples: with more the user had better know
ENOUGH = 1000  # examples tell how many of all are concerned
MANY = 20_000  # examples take a while to be encoded
CHARACTERS = 2_000_000  # of sources, too
logger = logging.getLogger(__name__)


class Clock:
    """Seconds by what they went to. What nothing else is named for is "step": the devices are at work then."""

    def __init__(self) -> None:
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


class Window:
    """The steps since the last log line; values stay on the device until then."""

    def __init__(
        self,
        config: Config,
        examples: int,
        log: Callable[[Line], None],
        progress: Progress,
        devices: Sequence[jax.Device],
        clock: Clock,
    ) -> None:
        assert config.model is not None
        self.examples, self.data, self.train, self.model = examples, config.data, config.train, config.model
        self.warned: set[str] = set()
        self.seen, self.missing = 0, Counter[str]()  # examples, and those from which something is missing
        self.log, self.progress = log, progress
        self.clock, self.steps, self.bad = clock, list[tuple[int, Batch, dict[str, Array]]](), 0
        peaks = [peak(device) for device in devices]
        whole = config.train.freeze == "none" and not config.train.lora_rank
        known = config.train.dtype != "float32" and whole and all(peaks)
        self.peak = sum(p for p in peaks if p) if known else None

    def add(self, step: int, batch: Batch, metrics: dict[str, Array]) -> None:
        self.steps.append((step, batch._replace(arrays={}), metrics))

    def flush(self) -> Line:
        """Writes a line of metrics.jsonl over all steps since the last, and one for each step that was left out."""
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
            **({"epoch": step * self.train.batch_size / self.examples} if self.examples else {}),
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
        if self.peak is not None and (flops := sum(self.model.training_flops(b.lengths) for b in batches)):
            values["mfu"] = flops / active / self.peak
        self.log(values)
        self._warn(values, len(lengths))
        judged, self.steps = self.steps, []
        for (step, batch, _), metrics in zip(judged, fetched, strict=True):
            self._judge(step, batch, metrics)
        return values

    def _warn(self, values: Line, examples: int) -> None:
        """Says once what is missing from more than a few of the examples, when more than a few batches tell."""
        said = {
            "cut_sources": f"sources are cut at data.max_source = {self.data.max_source} tokens",
            "cut_targets": f"targets are cut at data.max_target = {self.data.max_target} tokens and lose their ends",
        }
        self.seen += examples
        self.missing.update({name: values[name] for name in said})
        if self.seen < min(ENOUGH, self.examples or ENOUGH, self.train.steps * self.train.batch_size):
            return
        for name, words in said.items():
            if self.missing[name] > FEW * self.seen and name not in self.warned:
                self.warned.add(name)
                logger.warning(f"{100 * self.missing[name] / self.seen:.0f} % of the {words} ({name} in metrics.jsonl)")

    def settle(self) -> None:
        """Waits until no more than one step is under way: whoever wants to stop need not wait for many."""
        if len(self.steps) > 1:
            jax.block_until_ready(self.steps[-2][2])

    def _judge(self, step: int, batch: Batch, metrics: dict[str, np.ndarray]) -> None:
        if metrics["good"]:
            self.bad = 0
            return
        self.bad += 1
        loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
        found = f"loss {loss}, gradient norm {norm}"
        self.log({"event": "left_out", "step": step, "loss": str(loss), "grad_norm": str(norm), "ids": batch.ids})
        self.progress.line(f"step {step}: {found}; the update was left out (examples {few(batch.ids)})")
        if self.bad >= self.train.max_bad_steps:
            raise UserError(
                f"step {step}: found {found}, and none better in {self.bad} steps in a row (the last examples: "
                f"{', '.join(batch.ids)}); expected finite numbers at least once in train.max_bad_steps = "
                f"{self.train.max_bad_steps}; try a lower train.learning_rate, or look at the data"
            )


def warn_of_examples(examples: Sequence[Example], tokenizer: Tokenizer, config: Config) -> None:
    """Says at the start if batches are large, and which texts of ENOUGH drawn ones do not come back from tokens."""
    size, total = config.train.batch_size, len(examples)
    if (drawn := min(size * config.train.length_group, total)) > MANY:
        logger.info(f"{drawn} examples are encoded before the first step: train.length_group batches of them")
    if size > total:
        logger.warning(
            f"train.batch_size: found {size}, more than the {total} training examples; each update sees them "
            f"{size / total:.1f} times, so fewer do"
        )
    separator = config.data.separator if methods.trained(config).parts_text else ""

    def enough() -> Iterator[Example]:
        characters = 0
        for i in np.random.default_rng(0).permutation(total)[:ENOUGH]:
            example = examples[int(i)]
            yield example
            characters += len(example.source)
            if characters > CHARACTERS:
                return

    for line in describe_changes(enough(), tokenizer, separator, of=total):
        logger.warning(line)


def few(ids: list[str]) -> str:
    """The first eight of them, and how many more there are."""
    return ", ".join(ids[:8]) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
