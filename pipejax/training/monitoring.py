"""Monitoring of a training run: warnings about the data, a clock, utilisation of the devices, and lines of the log."""

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
from pipejax.data.encoding import describe_changes
from pipejax.data.examples import Example
from pipejax.data.tokenizer import Tokenizer
from pipejax.system.errors import UserError
from pipejax.system.progress import Progress
from pipejax.training.run_log import Line

# Dense bfloat16 operations per second, from the vendors' data sheets. For a device that is not listed, no utilisation
# is reported.
PEAKS = {
    "NVIDIA H200": 989e12,
    "NVIDIA H100": 989e12,  # the SXM variant
    "NVIDIA A100": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "TPU v6 lite": 918e12,
    "TPU v5p": 459e12,
    "TPU v5 lite": 197e12,
    "TPU v4": 275e12,
}


def peak(device: jax.Device) -> float | None:
    """Returns the bfloat16 operations per second of one device, or None for an unknown device."""
    if "H100" in device.device_kind and "HBM3" not in device.device_kind:  # the PCIe variant is slower
        return None
    names = [name for name in PEAKS if device.device_kind.startswith(name)]
    return PEAKS[max(names, key=len)] if names else None


Array = jax.Array
FEW = 0.05  # the share of affected examples above which a warning is logged
ENOUGH = 1000  # examples that suffice to estimate the share of affected ones
MANY = 20_000  # examples that take noticeably long to encode
CHARACTERS = 2_000_000  # characters of sources after which the sample of ENOUGH examples ends early
logger = logging.getLogger(__name__)


class Clock:
    """Measures seconds by activity. Time that no named block covers counts as "step", the work of the devices."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = defaultdict(float)
        self._named: dict[str, float] = defaultdict(float)
        self._since = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Counts the time of a `with` block under a name. Blocks must not be nested."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._named[name] += time.perf_counter() - begun

    def lap(self) -> dict[str, float]:
        """Returns the seconds by activity since the previous lap; they add up to the elapsed time."""
        now = time.perf_counter()
        lap = {name: self._named[name] for name in ("compile", "data", "checkpoint", "evaluation")}
        lap["step"] = max(now - self._since - sum(lap.values()), 0.0)
        self._named.clear()
        self._since = now
        for name, seconds in lap.items():
            self.totals[name] += seconds
        return lap


class Window:
    """The steps since the last line of the log; their metrics stay on the device until the next line."""

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
        self.seen, self.missing = 0, Counter[str]()  # examples seen, and by field how many were cut
        self.log, self.progress = log, progress
        self.clock, self.steps, self.bad = clock, list[tuple[int, Batch, dict[str, Array]]](), 0
        peaks = [peak(device) for device in devices]
        whole = config.train.freeze == "none" and not config.train.lora_rank
        known = config.train.dtype != "float32" and whole and all(peaks)
        self.peak = sum(p for p in peaks if p) if known else None

    def add(self, step: int, batch: Batch, metrics: dict[str, Array]) -> None:
        """Stores a step, its batch without the arrays, and its metrics, which the device may still be computing."""
        self.steps.append((step, batch._replace(arrays={}), metrics))

    def flush(self) -> Line:
        """Writes one line of metrics.jsonl for all steps since the last line, and one for each skipped update.

        Raises:
          UserError: `train.max_bad_steps` steps in a row had a loss or gradient that is not finite.
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
            self._check_step(step, batch, metrics)
        return values

    def _warn(self, values: Line, examples: int) -> None:
        """Warns once per field if more than `FEW` of the examples seen so far were cut, after enough examples."""
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
        """Waits until at most one step is in flight, so that a stop request never waits for many steps."""
        if len(self.steps) > 1:
            jax.block_until_ready(self.steps[-2][2])

    def _check_step(self, step: int, batch: Batch, metrics: dict[str, np.ndarray]) -> None:
        """Logs an update that was skipped because its loss or gradient is not finite; counts such steps in a row."""
        if metrics["good"]:
            self.bad = 0
            return
        self.bad += 1
        loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
        found = f"loss {loss}, gradient norm {norm}"
        self.log({"event": "left_out", "step": step, "loss": str(loss), "grad_norm": str(norm), "ids": batch.ids})
        self.progress.line(f"step {step}: {found}; the update was skipped (examples {few(batch.ids)})")
        if self.bad >= self.train.max_bad_steps:
            raise UserError(
                f"step {step}",
                found=f"{found}, the last of {self.bad} such steps in a row (the last examples: "
                f"{', '.join(batch.ids)})",
                expected="finite numbers at least once in train.max_bad_steps = "
                f"{self.train.max_bad_steps}; try a lower train.learning_rate, or check "
                "the data",
            )


def warn_of_examples(examples: Sequence[Example], tokenizer: Tokenizer, config: Config) -> None:
    """Warns at the start of a run if batches are large, and if texts change when they are encoded and decoded.

    The round trip is checked on a random sample of at most `ENOUGH` examples.
    """
    size, total = config.train.batch_size, len(examples)
    if (drawn := min(size * config.train.length_group, total)) > MANY:
        logger.info(f"{drawn} examples are encoded before the first step, as many as train.length_group batches")
    if size > total:
        logger.warning(
            f"train.batch_size: found {size}, more than the {total} training examples; each update "
            f"sees them {size / total:.1f} times, so a smaller value suffices"
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
    """Returns the first eight ids, and the number of the others."""
    return ", ".join(ids[:8]) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
