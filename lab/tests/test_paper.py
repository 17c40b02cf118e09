"""The docstrings and settings of the paper's experiment configs, compared with the tables."""

import itertools

import pytest

from lab.experiments.tables.cells import Cell
from lab.experiments.tables.paper import REPORTED
from support.paper_configs import EXPERIMENTS, TASKS, docstring_of, experiment


@pytest.mark.parametrize("task", TASKS)
def test_config_docstring_has_command_and_reported_numbers(task):
    text, words = docstring_of(task), docstring_of(task).split()
    assert f"--config configs/{task}.py --workdir runs/{Cell(task, 'base', 'pipelined').name}" in text
    assert f"prepare {task} --manual-dir" in text and "from-hf google-t5/t5-base checkpoints/t5-base" in text
    for size, objective in itertools.product(("base", "large"), ("pipelined", "sequential")):
        reported = REPORTED[task, size, objective]
        for scores in reported.scores.values():
            pairs = [scores[:2], scores[2:]] if len(scores) == 4 else [scores]
            assert all("/".join(map(str, pair)) in words for pair in pairs)
        assert str(reported.examples_per_second) in words


@pytest.mark.parametrize("task, size, objective", EXPERIMENTS)
def test_table_cell_trains_the_config_of_the_experiment(task, size, objective):
    assert Cell(task, size, objective).config([]) == experiment(task, size, objective)
