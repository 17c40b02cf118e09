"""Configurations of decoding on a GPU, which give the same tokens, and the trial that chooses the fastest.

A program on a GPU is a sequence of kernels, which the host starts in groups (CUDA graphs). By default the host also
controls the loops of a decode: after each iteration it waits for the condition. XLA can put whole loops into a CUDA
graph, so that the host starts a decode once. Which configuration is faster depends on the device, the model and the
batch. So the first decode of each shape on a device is repeated in several configurations (`Ways.decode`), and the
verdict is kept on disk (`pipejax.system.trials`).
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
class Way:
    """A configuration of the programs of a decode. The default one is the reference for all others."""

    graph: bool = False  # whether the loops are in a CUDA graph
    turn: int = 0  # steps in one iteration of a loop; 0: `programs.TURNS`
    kernels: bool = True  # whether the kernels of the backend compute the steps, if it has any

    @property
    def compiler_options(self) -> dict[str, str | bool] | None:
        """The options of XLA's compiler."""
        return {**GRAPH} if self.graph else None

    def __str__(self) -> str:
        loop = "loops in a CUDA graph" if self.graph else "loops on the host"
        turn = f"{self.turn or 'the usual'} step{'s' * (self.turn != 1)} in an iteration"
        return f"{loop}, {turn}, {'the kernels of the backend' if self.kernels else 'XLA alone'}"


USUAL = Way()
# The configurations by their texts, which the files of verdicts contain.
_EVERY = itertools.starmap(Way, itertools.product((False, True), (0, 1), (True, False)))
WAYS = {str(way): way for way in _EVERY}


class Size(NamedTuple):
    """The shape of a decode, for which the configurations are compared."""

    kind: Hashable  # strategy, batch and options
    length: Hashable  # of the sources
    facts: str  # everything that the programs depend on, as text


class Ways:
    """The configuration for each shape of a decode. Thread-safe; two threads may make the same trial twice."""

    def __init__(self, fixed: Way | None = None) -> None:
        """Creates a table without verdicts.

        Args:
          fixed: the configuration of all decodes; None: trials choose it.
        """
        self.fixed = fixed
        self._chosen: dict[tuple[Hashable, Hashable], Way] = {}
        self._of_kind: dict[Hashable, Way] = {}  # the last verdict for each kind

    def find(self, size: Size) -> Way:
        """Returns the configuration for a shape, without a trial: USUAL if there is no verdict yet."""
        if self.fixed:
            return self.fixed
        if (size.kind, size.length) in self._chosen:
            return self._chosen[size.kind, size.length]
        kept = _trial(size).kept(WAYS)
        return WAYS[kept.choice] if kept else USUAL

    def decode(self, size: Size, others: tuple[Way, ...], run: Callable[[Way], Decoded], report: Report) -> Decoded:
        """Decodes in the configuration for a shape. If the shape has no verdict, a trial compares the configurations.

        If a configuration cannot be compiled or fails, the decode is repeated in USUAL, which is used from then on.

        Args:
          size: the shape.
          others: the configurations to compare with USUAL, each with a single change.
          run: decodes in a configuration, and compiles its programs if they are missing.
          report: the time of a trial is added to its `compile_seconds`.
        """
        if self.fixed:
            return run(self.fixed)
        key, trial, answers = (size.kind, size.length), _trial(size), list[Decoded]()
        if size.kind in self._of_kind:  # there is a verdict for another length: only its choice is tried
            others = tuple({self._of_kind[size.kind]} - {USUAL})

        def decide() -> Verdict:
            answers.append(run(USUAL))
            begun, compiled = time.perf_counter(), report.compile_seconds
            verdict = _compare(others, run, answers[0])
            report.compile_seconds = compiled + time.perf_counter() - begun
            logger.info(f"{trial.name}: {verdict.choice} ({verdict.reason})")
            return verdict

        if key in self._chosen:
            way = self._chosen[key]
        else:
            way = WAYS[trial.verdict(WAYS, decide).choice]
            if not answers and size.kind not in self._of_kind:
                logger.info(f"{trial.name}: {way} (an earlier trial; pipejax trials lists all)")
        self._chosen[key] = self._of_kind[size.kind] = way
        if answers:
            return answers[0]
        try:
            return run(way)
        except UserError:
            raise
        except Exception as error:  # compilers and CUDA raise errors of many types
            if way == USUAL:
                raise
            logger.warning(f"{trial.name}: {USUAL}, because {way} failed ({described_error(error)})")
        trial.forget()
        self._chosen[key] = self._of_kind[size.kind] = USUAL
        return run(USUAL)


def changes(*, turn: int, kernels: bool) -> tuple[Way, ...]:
    """Returns the configurations to compare with USUAL, one for each change.

    Args:
      turn: the usual number of steps in an iteration.
      kernels: whether the backend has its own kernels.
    """
    graph = COMMAND_BUFFERS not in os.environ.get("XLA_FLAGS", "")  # otherwise the user has chosen
    found = Way(graph=True), Way(turn=1), Way(kernels=False)
    return tuple(way for way, useful in zip(found, (graph, turn > 1, kernels), strict=True) if useful)


def _trial(size: Size) -> Trial:
    return Trial("decoding configuration", size.facts)


def _compare(others: tuple[Way, ...], run: Callable[[Way], Decoded], expected: Decoded) -> Verdict:
    """Chooses the fastest configuration with the same tokens: adds changes one by one, and keeps each that saves time.

    Args:
      others: the configurations to compare with USUAL.
      run: decodes in a configuration.
      expected: the result of USUAL.
    """
    best, reasons, lasts = USUAL, list[str](), True
    for other in others:
        way = dataclasses.replace(best, **_changed(other))
        try:
            found = run(way)
        except Exception as error:  # as in `Ways.decode`; also a lack of memory
            reasons.append(f"{way}: failed, {described_error(error)}")
            lasts &= not out_of_memory(error)
            continue
        if not _are_same(found, expected):
            reasons.append(f"{way}: other tokens")
            logger.warning(f"decoding with {best}, because {way} gives other tokens")
            continue
        before, after = _times(run, best, way)
        reasons.append(f"{1e3 * before:.2f} ms a decode with {best}, {1e3 * after:.2f} ms with {way}")
        best = way if after < GAIN * before else best
    return Verdict(str(best), "; ".join(reasons) or "nothing to compare", lasts)


def _changed(way: Way) -> dict[str, Any]:
    """Returns the fields of a configuration that differ from USUAL."""
    return {name: value for name, value in vars(way).items() if value != getattr(USUAL, name)}


def _times(run: Callable[[Way], Decoded], *ways: Way) -> Iterator[float]:
    """Yields the shortest time of a decode in each configuration, in seconds; the configurations alternate."""
    times = dict[Way, list[float]]()
    for _ in range(ROUNDS):
        for way in ways:
            begun = time.perf_counter()
            run(way)
            times.setdefault(way, []).append(time.perf_counter() - begun)
    yield from map(min, times.values())


def _are_same(found: Decoded, expected: Decoded) -> bool:
    """Whether two results have the same rows of tokens and the same steps."""

    def rows(decoded: Decoded) -> Any:
        real = np.arange(decoded.tokens.shape[-1]) < np.asarray(decoded.lengths)[..., None]
        return np.where(real, decoded.tokens, -1), decoded.lengths, decoded.steps, decoded.truncated

    return all(map(np.array_equal, jax.tree.leaves(rows(found)), jax.tree.leaves(rows(expected))))
