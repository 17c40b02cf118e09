"""Evaluation on the dev split during training: loss, decoding scores, the best parameters, and early stopping."""

import dataclasses
import logging
import textwrap
from collections.abc import Callable, Sequence

import jax
import numpy as np

from pipejax.checkpoint import Best
from pipejax.checkpoint.fingerprint import digest, fingerprints
from pipejax.config import Config
from pipejax.data import make_task
from pipejax.data.batches import fixed_batches, pack_size
from pipejax.data.encoding import Encoded, encode_example
from pipejax.data.examples import Example
from pipejax.data.shapes import Shapes
from pipejax.data.tokenizer import Tokenizer
from pipejax.inference.answers import texts
from pipejax.inference.generator import Generator
from pipejax.metrics import HEADLINES
from pipejax.model import auxiliary
from pipejax.offline.evaluation import evaluate
from pipejax.system import Tree, distributed
from pipejax.system.progress import Progress
from pipejax.system.strict_json import JsonObject
from pipejax.training.monitoring import few
from pipejax.training.run_directory import RunDirectory
from pipejax.training.run_log import Line, score_of

Array = jax.Array
logger = logging.getLogger(__name__)
SAMPLES = 3  # examples whose predictions are shown after each evaluation


def bound_decoding(config: Config, encoded: Sequence[Encoded]) -> Config:
    """Returns the config with the limits of decoding reduced to about 1.5 times the longest dev target.

    The limits are `grid.time_max`, `grid.sub_max` and `decode.max_length`; each becomes at most 1.5 times the longest
    target plus 8. A model that has not learned to end its rows decodes up to its limits, so without this reduction the
    first evaluations would take minutes. The config is returned unchanged for a custom method, and if `data.max_target`
    cut a target, because the true lengths are then unknown.
    """
    if not encoded or config.method is not None or any(e.target_was_cut for e in encoded):
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
    """Raised between two batches to end a decoding run when the training has to stop."""


class Examiner:
    """Evaluates the trained parameters on the dev split and keeps the state of early stopping.

    On resume, the best score and the number of evaluations without improvement are rebuilt from the run's log.
    """

    def __init__(
        self,
        config: Config,
        loss: Callable[[Tree, dict[str, np.ndarray]], tuple[Array, Array]],
        shapes: Shapes,
        dev: Sequence[Example],
        tokenizer: Tokenizer,
        directory: RunDirectory,
        best: Best | None,
        write: Callable[[Line], None],
    ) -> None:
        self.config, self.loss, self.shapes, self.tokenizer, self.write = config, loss, shapes, tokenizer, write
        most = config.train.evaluate_examples
        self.examples: list[Example] = list(dev[:most] if most else dev)
        assert config.model is not None
        self.encoded = [encode_example(e, tokenizer, config, config.model) for e in self.examples]
        self.generator: Generator | None = None
        self.best = best
        self.highest, self.without_better = [-np.inf, -np.inf], 0
        metric, before = config.data.metric or make_task(config.data).metric, ""
        for line in directory.logged("evaluation"):
            before = line["metric"]
            if before == metric:
                self._count(score_of(line))
        # An older release had another default metric.
        if distributed.same(before) not in ("", metric) and best is not None:
            logger.warning(f"scores by {before} so far, by {metric} from here on: best/ is selected again")
            best.score = ()
        self.highest, self.without_better = distributed.same((self.highest, self.without_better))
        # Batches of the dev loss are no larger than one part of a training batch, so they fit in the memory if training
        # does.
        part = config.train.batch_size // config.train.accumulate
        self.parts = dataclasses.replace(config.train, batch_size=part, pack=pack_size(config.train))

    @property
    def lost_patience(self) -> bool:
        """Whether the last `train.patience` evaluations in a row were no better than the best one."""
        return 0 < self.config.train.patience <= self.without_better

    def evaluate(
        self,
        step: int,
        params: Tree,
        progress: Progress,
        stopped: Callable[[], bool],
        reach: Callable[[str], None] = lambda count: None,
    ) -> bool:
        """Computes the dev loss, decodes and scores the dev split, and offers the parameters to `best`.

        `best` keeps the parameters with the highest main score; between equal scores, the lower loss decides. The line
        in the log is written last. A run that is killed before that evaluates again on resume, so no best step is
        missed.

        Args:
          step: the number of updates made.
          params: the parameters after these updates.
          progress: the progress display, which gets the scores and a few samples.
          stopped: a function that returns whether the training has to stop, called before and after each batch. After
            True the evaluation is abandoned, and neither `best` nor the log changes.
          reach: a function that is called with the progress as text, such as "8 of 64 answers", counted over all
            processes.

        Returns:
          Whether the evaluation was completed.
        """
        if stopped():
            return False
        own, _ = auxiliary.split(params)
        if self.generator is None:
            self.generator = Generator(bound_decoding(self.config, self.encoded), own, self.tokenizer)
        else:
            self.generator.programs.set_params(own)

        answers, total = 0, len(self.examples)

        def tick(count: int) -> None:
            nonlocal answers
            # All processes decode equally many examples, and each decodes the remainder as well.
            answers += count * jax.process_count()
            reach(f"{min(answers, total)} of {total} answers")
            if stopped():
                raise _Stopped

        try:
            size = self.config.decode.batch_size
            values, records = evaluate(self.generator, self.examples, batch_size=size, tick=tick)
        except _Stopped:
            return False
        finally:
            self.generator.programs.forget_params()  # frees device memory for training
        reach("the loss of the dev split")
        loss = self._dev_loss(params, stopped)
        if loss is None:
            return False
        headline = HEADLINES[values["metric"]]
        progress.line(
            f"step {step}: dev loss {loss:.4f}, {headline} {values[headline]:.2f}, {values['steps']:.1f} steps"
        )
        samples: list[JsonObject] = [
            {"id": example.id, "gold": [*example.targets], "predicted": texts(record)}
            for example, record in zip(self.examples[:SAMPLES], records, strict=False)
        ]
        for sample in samples:
            shown = (textwrap.shorten(few(sample[which]), 200, placeholder=" ...") for which in ("gold", "predicted"))
            gold, predicted = (text or "(nothing)" for text in shown)
            progress.line(f"  {sample['id']}: {predicted}  (expected: {gold})")
        score = tuple(distributed.same([values[headline], -loss]))
        if self.best is not None:
            self.best.offer(step, score, params)
        params_fp = digest(fingerprints(own))
        line = {"event": "evaluation", "step": step, "dev_loss": loss, **values, "params_fp": params_fp}
        used = self.generator.config
        bounds = {"time_max": used.grid.time_max, "sub_max": used.grid.sub_max, "max_length": used.decode.max_length}
        self.write(line | {"bounds": bounds, "samples": samples})
        self._count(score)
        return True

    def _count(self, score: Sequence[float]) -> None:
        better = [*score] > self.highest
        self.highest, self.without_better = ([*score], 0) if better else (self.highest, self.without_better + 1)

    def _dev_loss(self, params: Tree, stopped: Callable[[], bool]) -> float | None:
        sums = []
        for batch in fixed_batches(self.encoded, self.parts, self.shapes):
            if stopped():
                return None
            sums.append(jax.device_get(self.loss(params, batch.arrays)))
        totals, counts = np.asarray(sums, np.float64).T
        return float(totals.sum() / max(counts.sum(), 1))
