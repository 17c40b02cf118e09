"""One trained model of the tables: its run directory, how it is made, and what its evaluations said."""

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
# What a size sets beyond configs/TASK.py, which is T5-Base's; "scratch" has files of its own.
SIZES: dict[str, tuple[str, ...]] = {
    "base": (),
    "large": ("train.init_from=checkpoints/t5-large", "train.remat=layers", "mesh.fsdp=2"),
    "scratch": (),
}
DTYPES = ("float32", "bfloat16")  # of decoding; the paper's memory figures are those of float32 weights
TIME_MAX, SUB_MAX = 50, 20  # the bounds that the paper prints, for all data sets (section 4.3)
Scores = dict[str, Any]  # what `python -m pipejax evaluate` writes


@dataclasses.dataclass(frozen=True)
class Cell:
    """A task, a size, what it is trained for, and Δt. "scratch" is a small T5 of our own, not the paper's."""

    task: str
    size: str
    objective: str
    delay: int = 1

    @property
    def name(self) -> str:
        """Of its run directory."""
        return f"{self.task}_{self.size}_{self.objective}" + (f"_delay{self.delay}" if self.delay > 1 else "")

    @property
    def path(self) -> Path:
        """Its config file."""
        return ROOT / "configs" / f"{self.task}{'_scratch' if self.size == 'scratch' else ''}.py"

    def settings(self, overrides: Sequence[str]) -> list[str]:
        """All that is set beyond the config file."""
        return [*SIZES[self.size], *overrides, f"train.method={self.objective}", f"grid.delay={self.delay}"]

    def config(self, overrides: Sequence[str]) -> Config:
        """As it trains."""
        return load(self.path, self.settings(overrides))


class Way(NamedTuple):
    """How a model is decoded."""

    strategy: str
    beams: int = 1  # of the sequential strategy
    dtype: str = DTYPES[0]
    printed: bool = False  # under the bounds that the paper prints, not those of the config

    @property
    def label(self) -> str:
        """For people."""
        beams = f"-{self.beams}-beams" if self.beams > 1 else ""
        return f"{self.strategy}{beams}" + (f", as printed ({TIME_MAX}/{SUB_MAX})" if self.printed else "")

    @property
    def name(self) -> str:
        """Of its files."""
        beams = f"-{self.beams}-beams" if self.beams > 1 else ""
        return f"{self.strategy}{beams}{f'-{TIME_MAX}x{SUB_MAX}' if self.printed else ''}-{self.dtype}"

    @property
    def settings(self) -> list[str]:
        """All that is set beyond the run's config."""
        bounds = [f"grid.time_max={TIME_MAX}", f"grid.sub_max={SUB_MAX}"] if self.printed else []
        return [f"decode.beams={self.beams}", f"decode.dtype={self.dtype}", *bounds]


def evaluation(run: Path, split: str, way: Way) -> Path:
    """Where the scores of a run are; the predictions lie beside them as .jsonl."""
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
    """Trains the cell and evaluates it, as far as that is not done; the exit code of what failed, or 0.

    Each is a process of its own: what `peak memory` says is that of one decoder, and a device's memory is free again.
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
    """Whether that evaluation is there, of so many documents, and of the weights that are the run's best now."""
    if not path.is_file():
        return False
    found = _load(path)
    return found["limit"] == limit and found["params_fp"] == _best(run)


def _best(run: Path) -> str | None:
    """The fingerprint of the best weights, as their manifest has it."""
    store = Store(run / "best")
    steps = store.steps() if (run / "best").is_dir() else []
    return digest(store.describe(steps[0]).arrays["params"]) if steps else None


def _load(path: Path) -> Scores:
    try:
        found: Scores = json.loads(path.read_text(encoding="utf-8"))
        if not {"metric", "steps", "by_rows", "examples", "strategy", "params_fp", "limit"} <= found.keys():
            raise ValueError("keys are missing")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(path, f"not what `python -m pipejax evaluate --json` writes ({error})") from error
    return found


def read(cell: Cell, workdir: Path, split: str, way: Way) -> Scores | None:
    """The scores of a cell, if it was evaluated; those of weights that are not its run's best any more do not count."""
    run = workdir / cell.name
    path = evaluation(run, split, way)
    if not path.is_file():
        return None
    found = _load(path)
    if found["params_fp"] != _best(run):
        logger.warning(f"{path}: of other weights than those in {run / 'best'}; not used")
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
    """All cells of these tasks and sizes that have a config; `delays`: those of a task beside 1, in the first size."""
    cells = [Cell(task, size, objective) for task in tasks for size in sizes for objective in METHODS[::-1]]
    cells += [
        Cell(task, size, "pipelined", delay) for task in tasks for size in sizes[:1] for delay in delays.get(task, ())
    ]
    return [cell for cell in cells if cell.path.is_file()]


def ways_of(cell: Cell, dtypes: Sequence[str], overrides: Sequence[str] = ()) -> list[Way]:
    """As it was trained, in each dtype; rows in the first one under the printed bounds too, unless they are its own."""
    own = [Way(cell.objective, dtype=dtype) for dtype in dtypes]
    bounds = cell.config(overrides).grid
    if cell.objective == "pipelined" and (bounds.time_max, bounds.sub_max) != (TIME_MAX, SUB_MAX):
        own.insert(1, own[0]._replace(printed=True))
    return own


def _run(*command: str) -> int:
    return subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode
