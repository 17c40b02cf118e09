"""Configurations of decoding on a GPU, which give the same tokens, and the trial that chooses the fastest.

A program on a GPU is a sequence of kernels, which the host starts in groups (CUDA graphs). By default the host also
controls the loops of a decode: after each iteration it waits for the condition. XLA can put whole loops into a CUDA
graph, so that the host starts a decode once. Which configuration is faster depends on the device, the model and the
batch. So the first decode of each shape on a device is repeated in several configurations
(`ConfigurationTable.decode`), and the verdict is kept on disk (`pipejax.system.trials`). A running batch
(`pipejax.inference.running_batch`) always uses the default configuration.
"""

import dataclasses
import itertools
import logging
import os
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from pipejax.decoding import Decoded
from pipejax.inference.report import Report
from pipejax.system.errors import UserError, described_error, out_of_memory
from pipejax.system.trials import Trial, Verdict

logger = logging.getLogger(__name__)

ROUNDS = 3  # timed decodes in each of two configurations; the shortest time counts
GAIN = 0.98  # a configuration replaces another one if it takes at most this share of its time
COMMAND_BUFFERS = "xla_gpu_enable_command_buffer"
# XLA's default commands of a CUDA graph, and loops.
GRAPH = {
    COMMAND_BUFFERS: "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL",
}


@dataclasses.dataclass(frozen=True)
class Configuration:
    """A configuration of the programs of a decode. The default one is the reference for all others."""

    graph: bool = False  # whether the loops are in a CUDA graph
    steps: int = 0  # steps in one iteration of a loop; 0: `programs.ITERATION_STEPS`
    kernels: bool = True  # whether the kernels of the backend compute the steps, if it has any

    @property
    def compiler_options(self) -> dict[str, str | bool] | None:
        """The options of XLA's compiler."""
        return {**GRAPH} if self.graph else None

    def __str__(self) -> str:
        loop = "loops in a CUDA graph" if self.graph else "loops on the host"
        steps = f"{self.steps or 'the default number of'} step{'s' * (self.steps != 1)} in an iteration"
        return f"{loop}, {steps}, {'the kernels of the backend' if self.kernels else 'XLA alone'}"


DEFAULT = Configuration()
# The configurations by their texts, which the files of verdicts contain.
_EVERY = itertools.starmap(Configuration, itertools.product((False, True), (0, 1), (True, False)))
CONFIGURATIONS = {str(configuration): configuration for configuration in _EVERY}


class DecodeShape(NamedTuple):
    """The shape of a decode, for which the configurations are compared."""

    kind: Hashable  # strategy, batch and options
    length: Hashable  # the padded length of the sources
    facts: str  # everything that the programs depend on, as text


class ConfigurationTable:
    """The configuration for each shape of a decode. The table is thread-safe; two threads may make the same trial."""

    def __init__(self, fixed: Configuration | None = None) -> None:
        """Creates a table without verdicts.

        Args:
          fixed: the configuration of all decodes; None: trials choose it.
        """
        self.fixed = fixed
        self._chosen: dict[tuple[Hashable, Hashable], Configuration] = {}
        self._of_kind: dict[Hashable, Configuration] = {}  # the last verdict for each kind

    def find(self, shape: DecodeShape) -> Configuration:
        """Returns the configuration for a shape, without a trial; the result is DEFAULT if there is no verdict yet."""
        if self.fixed:
            return self.fixed
        if (shape.kind, shape.length) in self._chosen:
            return self._chosen[shape.kind, shape.length]
        kept = _trial(shape).kept(CONFIGURATIONS)
        return CONFIGURATIONS[kept.choice] if kept else DEFAULT

    def decode(
        self,
        shape: DecodeShape,
        others: tuple[Configuration, ...],
        run: Callable[[Configuration], Decoded],
        report: Report,
    ) -> Decoded:
        """Decodes in the configuration for a shape. If the shape has no verdict, a trial compares the configurations.

        If a configuration cannot be compiled or fails, the decode is repeated in DEFAULT, which is used from then on.

        Args:
          shape: the shape.
          others: the configurations to compare with DEFAULT, each with a single change.
          run: a function that decodes in a configuration, and compiles its programs if they are missing.
          report: the report, to whose `compile_seconds` the time of a trial is added.
        """
        if self.fixed:
            return run(self.fixed)
        key, trial, answers = (shape.kind, shape.length), _trial(shape), list[Decoded]()
        if shape.kind in self._of_kind:  # there is a verdict for another length: only its choice is tried
            others = tuple({self._of_kind[shape.kind]} - {DEFAULT})

        def decide() -> Verdict:
            answers.append(run(DEFAULT))
            begun, compiled = time.perf_counter(), report.compile_seconds
            verdict = _compare(others, run, answers[0])
            report.compile_seconds = compiled + time.perf_counter() - begun
            logger.info(f"{trial.name}: {verdict.choice} ({verdict.reason})")
            return verdict

        if key in self._chosen:
            configuration = self._chosen[key]
        else:
            configuration = CONFIGURATIONS[trial.verdict(CONFIGURATIONS, decide).choice]
            if not answers and shape.kind not in self._of_kind:
                logger.info(f"{trial.name}: {configuration} (an earlier trial; pipejax trials lists all)")
        self._chosen[key] = self._of_kind[shape.kind] = configuration
        if answers:
            return answers[0]
        try:
            return run(configuration)
        except UserError:
            raise
        except Exception as error:  # compilers and CUDA raise errors of many types
            if configuration == DEFAULT:
                raise
            logger.warning(
                f"{trial.name}: {configuration} failed ({described_error(error)}); {DEFAULT} is used from now on"
            )
        trial.forget()
        self._chosen[key] = self._of_kind[shape.kind] = DEFAULT
        return run(DEFAULT)


def changes(*, steps: int, kernels: bool) -> tuple[Configuration, ...]:
    """Returns the configurations to compare with DEFAULT, one for each change.

    Args:
      steps: the default number of steps in an iteration.
      kernels: whether the backend has its own kernels.
    """
    graph = COMMAND_BUFFERS not in os.environ.get("XLA_FLAGS", "")  # False if the user has set these flags
    found = Configuration(graph=True), Configuration(steps=1), Configuration(kernels=False)
    possible = graph, steps > 1, kernels
    return tuple(itertools.compress(found, possible))


def _trial(shape: DecodeShape) -> Trial:
    return Trial("decoding configuration", shape.facts)


def _compare(others: tuple[Configuration, ...], run: Callable[[Configuration], Decoded], expected: Decoded) -> Verdict:
    """Chooses the fastest configuration with the same tokens: adds changes one by one, and keeps each that saves time.

    Args:
      others: the configurations to compare with DEFAULT.
      run: a function that decodes in a configuration.
      expected: the result of DEFAULT.
    """
    best, reasons, lasts = DEFAULT, list[str](), True
    for other in others:
        configuration = dataclasses.replace(best, **_changed(other))
        try:
            found = run(configuration)
        except Exception as error:  # as in `ConfigurationTable.decode`; also a lack of memory
            reasons.append(f"{configuration}: failed, {described_error(error)}")
            lasts &= not out_of_memory(error)
            continue
        if not _are_same(found, expected):
            reasons.append(f"{configuration}: other tokens")
            logger.warning(f"decoding with {best}, because {configuration} gives other tokens")
            continue
        before, after = _times(run, best, configuration)
        reasons.append(f"{1e3 * before:.2f} ms a decode with {best}, {1e3 * after:.2f} ms with {configuration}")
        best = configuration if after < GAIN * before else best
    return Verdict(str(best), "; ".join(reasons) or "nothing to compare", lasts)


def _changed(configuration: Configuration) -> dict[str, Any]:
    """Returns the fields of a configuration that differ from DEFAULT."""
    return {name: value for name, value in vars(configuration).items() if value != getattr(DEFAULT, name)}


def _times(run: Callable[[Configuration], Decoded], *configurations: Configuration) -> Iterator[float]:
    """Yields the shortest time of a decode in each configuration, in seconds; the configurations alternate."""
    times = dict[Configuration, list[float]]()
    for _ in range(ROUNDS):
        for configuration in configurations:
            begun = time.perf_counter()
            run(configuration)
            times.setdefault(configuration, []).append(time.perf_counter() - begun)
    yield from map(min, times.values())


def _are_same(found: Decoded, expected: Decoded) -> bool:
    """Returns whether two results have the same rows of tokens and the same steps."""

    def rows(decoded: Decoded) -> Any:
        real = np.arange(decoded.tokens.shape[-1]) < np.asarray(decoded.lengths)[..., None]
        return np.where(real, decoded.tokens, -1), decoded.lengths, decoded.steps, decoded.truncated

    return all(map(np.array_equal, jax.tree.leaves(rows(found)), jax.tree.leaves(rows(expected))))
