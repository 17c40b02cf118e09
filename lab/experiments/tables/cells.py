"""The trained models of the tables: their run directories, their trainings, and the results of their evaluations."""

import dataclasses
import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipejax.apps.compare import bootstrap
from pipejax.checkpoint import Store
from pipejax.checkpoint.fingerprint import digest
from pipejax.config import METHODS, Config, load
from pipejax.data.lines import read_file
from pipejax.system.errors import UserError

logger = logging.getLogger("pipejax.tables")
ROOT = Path(__file__).resolve().parents[3]
# The settings of a size in addition to configs/TASK.py, which is for T5-Base; "scratch" has separate files.
SIZES: dict[str, tuple[str, ...]] = {
    "base": (),
    "large": ("train.init_from=checkpoints/t5-large", "train.remat=layers", "mesh.fsdp=2"),
    "scratch": (),
}
DTYPES = ("float32", "bfloat16")  # dtypes of decoding; the paper's memory figures fit float32 weights
TIME_MAX, SUB_MAX = 50, 20  # the bounds that the paper prints, for all data sets (section 4.3)
Scores = dict[str, Any]  # the scores that `python -m pipejax evaluate` writes


@dataclasses.dataclass(frozen=True)
class Cell:
    """A trained model: task, size, objective and Δt. The size "scratch" is a small T5 that the paper does not have."""

    task: str
    size: str
    objective: str
    delay: int = 1

    @property
    def name(self) -> str:
        """The name of the run directory."""
        return f"{self.task}_{self.size}_{self.objective}" + (f"_delay{self.delay}" if self.delay > 1 else "")

    @property
    def path(self) -> Path:
        """The path of the config file."""
        return ROOT / "configs" / f"{self.task}{'_scratch' if self.size == 'scratch' else ''}.py"

    def settings(self, overrides: Sequence[str]) -> list[str]:
        """The settings in addition to the config file."""
        return [*SIZES[self.size], *overrides, f"train.method={self.objective}", f"grid.delay={self.delay}"]

    def config(self, overrides: Sequence[str]) -> Config:
        """The config of the training."""
        return load(self.path, self.settings(overrides))


class Way(NamedTuple):
    """A way to decode a model."""

    strategy: str
    beams: int = 1  # beams of the sequential strategy
    dtype: str = DTYPES[0]
    printed: bool = False  # under the bounds in the paper, and not under the config's

    @property
    def label(self) -> str:
        """The label of the way in tables."""
        beams = f"-{self.beams}-beams" if self.beams > 1 else ""
        return f"{self.strategy}{beams}" + (f", as printed ({TIME_MAX}/{SUB_MAX})" if self.printed else "")

    @property
    def name(self) -> str:
        """The name of the files of an evaluation."""
        beams = f"-{self.beams}-beams" if self.beams > 1 else ""
        return f"{self.strategy}{beams}{f'-{TIME_MAX}x{SUB_MAX}' if self.printed else ''}-{self.dtype}"

    @property
    def settings(self) -> list[str]:
        """The settings in addition to the run's config."""
        bounds = [f"grid.time_max={TIME_MAX}", f"grid.sub_max={SUB_MAX}"] if self.printed else []
        return [f"decode.beams={self.beams}", f"decode.dtype={self.dtype}", *bounds]


def evaluation(run: Path, split: str, way: Way) -> Path:
    """The path of the scores of a run; the predictions are in the same folder as .jsonl."""
    return run / "evaluation" / f"{split}-{way.name}.json"


def make(
    cell: Cell,
    workdir: Path,
    *,
    splits: Sequence[str],
    overrides: Sequence[str],
    limit: int | None,
    ways: Sequence[Way],
) -> int:
    """Trains the cell and evaluates it, unless that is done; returns the exit code of a failed command, or 0.

    Each command is a separate process, so that `peak memory` is the memory of one decoder, and the device's memory is
    free again afterwards.
    """
    run = workdir / cell.name
    logger.info(f"--- {cell.name}")
    settings = [flag for setting in cell.settings(overrides) for flag in ("--set", setting)]
    code = _run("train.py", "--config", str(cell.path), "--workdir", str(run), *settings)
    for split in splits:
        for way in ways:
            path = evaluation(run, split, way)
            if code or fresh(path, run, limit=limit):
                continue
            path.parent.mkdir(exist_ok=True)
            flags = ["--checkpoint", str(run), "--best", "--split", split, "--method", way.strategy]
            flags += [flag for setting in way.settings for flag in ("--set", setting)]
            flags += ["--limit", str(limit)] if limit else []
            logger.info(f"--- {cell.name}, {way.label} in {way.dtype} on {split}")
            code = _run(
                *("-m", "pipejax", "evaluate", *flags, "--json", str(path)),
                *("--predictions", str(path.with_suffix(".jsonl"))),
            )
    return code


def fresh(path: Path, run: Path, *, limit: int | None) -> bool:
    """Whether the evaluation exists, with this many documents, and for the present best weights of the run."""
    if not path.is_file():
        return False
    found = _load(path)
    return found["limit"] == limit and found["params_fp"] == _best(run)


def _best(run: Path) -> str | None:
    """The fingerprint of the best weights, from their manifest."""
    store = Store(run / "best")
    steps = store.steps() if (run / "best").is_dir() else []
    return digest(store.describe(steps[0]).arrays["params"]) if steps else None


def _load(path: Path) -> Scores:
    try:
        found: Scores = json.loads(path.read_text(encoding="utf-8"))
        if not {"metric", "steps", "by_rows", "examples", "strategy", "params_fp", "limit"} <= found.keys():
            raise ValueError("keys are missing")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(path, f"not a file of `python -m pipejax evaluate --json` ({error})") from error
    return found


def read(cell: Cell, workdir: Path, split: str, way: Way) -> Scores | None:
    """The scores of a cell, or None if it was not evaluated with the present best weights of its run."""
    run = workdir / cell.name
    path = evaluation(run, split, way)
    if not path.is_file():
        return None
    found = _load(path)
    if found["params_fp"] != _best(run):
        logger.warning(f"{path}: evaluates other weights than {run / 'best'}; not used")
        return None
    return found


def gap(
    cells: dict[str, Cell], workdir: Path, split: str, metric: str, dtype: str
) -> dict[str, tuple[float, float, float]]:
    """Pipelined minus sequential, with the 95 % interval of a paired bootstrap over the documents."""
    files = [
        evaluation(workdir / cells[s].name, split, Way(s, dtype=dtype)).with_suffix(".jsonl")
        for s in ("sequential", "pipelined")
    ]
    first, second = (list[Any](line for _, line in read_file(str(path))) for path in files)
    if [line["id"] for line in first] != [line["id"] for line in second]:
        raise UserError(files[1], found=f"other documents than in {files[0]}; evaluate both again")
    sources, gold = [line.get("document") or line["source"] for line in first], [line["gold"] for line in first]
    return bootstrap.gap(metric, sources, gold, [line["pred"] for line in first], [line["pred"] for line in second])


def grid_of(tasks: Sequence[str], sizes: Sequence[str], delays: dict[str, Sequence[int]]) -> list[Cell]:
    """All cells of these tasks and sizes that have a config; `delays`: further Δt of a task, in the first size."""
    cells = [Cell(task, size, objective) for task in tasks for size in sizes for objective in METHODS[::-1]]
    cells += [
        Cell(task, size, "pipelined", delay) for task in tasks for size in sizes[:1] for delay in delays.get(task, ())
    ]
    return [cell for cell in cells if cell.path.is_file()]


def ways_of(cell: Cell, dtypes: Sequence[str], overrides: Sequence[str] = ()) -> list[Way]:
    """The ways to decode a cell: by its method in each dtype, and rows in the first dtype under the paper's bounds."""
    own = [Way(cell.objective, dtype=dtype) for dtype in dtypes]
    bounds = cell.config(overrides).grid
    if cell.objective == "pipelined" and (bounds.time_max, bounds.sub_max) != (TIME_MAX, SUB_MAX):
        own.insert(1, own[0]._replace(printed=True))
    return own


def _run(*command: str) -> int:
    return subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode
