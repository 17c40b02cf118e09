"""The configs of the paper's experiments, and the settings in their docstrings."""

import ast
import itertools
from collections.abc import Iterable
from pathlib import Path

from pipejax.config import Config, load

CONFIGS = Path(__file__).parents[2] / "configs"
TASKS = ("msqa", "kp20k", "kptimes", "wikihowqa", "cnn_dailymail", "pubmed")
EXPERIMENTS = list(itertools.product(TASKS, ("base", "large"), ("pipelined", "sequential")))


def docstring_of(task: str) -> str:
    """The docstring of a task's config."""
    return ast.get_docstring(ast.parse((CONFIGS / f"{task}.py").read_text())) or ""


def settings_of(task: str, size: str, objective: str) -> list[str]:
    """The settings in a config's docstring for a size and an objective."""
    lines = [line.strip() for line in docstring_of(task).splitlines() if line.strip().startswith("--set ")]
    wanted = [line for line in lines if f"/t5-{size}" in line or line.endswith(f"={objective}")]
    assert len(lines) == 2 and len(wanted) == (size == "large") + (objective == "sequential")
    return [setting.strip() for line in wanted for setting in line.split("--set ")[1:]]


def experiment(task: str, size: str, objective: str, settings: Iterable[str] = ()) -> Config:
    """The config of a task with the settings of `settings_of` and further settings."""
    return load(CONFIGS / f"{task}.py", [*settings_of(task, size, objective), *settings])
