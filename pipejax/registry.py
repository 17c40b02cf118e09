"""Tables of the parts of pipejax that are imported by name: commands, backbones, kernels and tasks.

The core is all of pipejax except `apps/`, `backbones/` and `kernels/`, and it imports these three folders only through
this module. An entry is "MODULE:NAME", or "MODULE" for a whole module, and is imported when it is first needed.
"""

import importlib
import operator
from typing import Any

# The commands of `pipejax`, by name: a summary, and the module whose `main` runs the command.
COMMANDS = {
    "train": ("train a T5, or continue a run", "pipejax.training.train_command"),
    "teach": ("teach a sequential T5 to write rows, from texts without labels", "pipejax.apps.teach.teach_command"),
    "decode": ("decode a file of sources", "pipejax.offline.decode_command"),
    "serve": ("answer requests over HTTP", "pipejax.apps.serving.serve_command"),
    "bulk": ("decode many files by several processes", "pipejax.apps.bulk.bulk_command"),
    "evaluate": ("decode a split of a task and score it", "pipejax.offline.evaluation"),
    "export": ("export decoding as files that need only JAX", "pipejax.apps.export.export_command"),
    "convert": ("weights from and to Hugging Face, and to fewer bytes", "pipejax.convert.__main__"),
    "push": ("share a run as a model of the Hugging Face hub", "pipejax.apps.hub.push_command"),
    "plan": ("plan the memory that training needs on each device", "pipejax.apps.plan.plan_command"),
    "data": (
        "prepare published data sets; count examples and tokens of a split",
        "pipejax.apps.statistics.data_command",
    ),
    "metrics": ("score a file of predictions", "pipejax.apps.scoring.metrics_command"),
    "checkpoint": ("verify the steps of a run", "pipejax.apps.verify.checkpoint_command"),
    "trials": ("list or remove the results of trials on this machine's GPUs", "pipejax.apps.trials.trials_command"),
    "compare": ("runs side by side; methods and drafters on one split", "pipejax.apps.compare.compare_command"),
    "probe": ("measure how much the rows of labelled answers need one another", "pipejax.apps.probe.probe_command"),
    "picture": ("draw a record's grid, or the curves of runs, as a page", "pipejax.apps.picture.picture_command"),
}

# Backbones by the model_type of a config.json: classes of `pipejax.model.backbone.Backbone`.
BACKBONES = {
    "t5": "pipejax.model.t5_config:T5Config",
    "mt5": "pipejax.model.t5_config:T5Config",
    "umt5": "pipejax.backbones.umt5:UMT5Config",
    "t5gemma": "pipejax.backbones.t5gemma:T5GemmaConfig",
    "t5gemma2": "pipejax.backbones.t5gemma2:T5Gemma2Config",
}

# Methods of other papers, by the name that the setting `method` accepts instead of MODULE:CLASS.
METHODS = {
    "branching": "pipejax.apps.family.branching:Branching",
    "prompt_in_decoder": "pipejax.apps.family.prompts:PromptInDecoder",
}

# Kernels that replace XLA's. Each function maps a backbone, its backend with XLA and the compute dtype to a backend, or
# to None if the kernel does not support them. `inference.backends.fastest` tries the functions in this order.
STEP_COMPUTERS = {
    "cpu": "pipejax.kernels.backends:cpu_decoder_backend",
    "gpu": "pipejax.kernels.backends:gpu_backend",
    "cpu products": "pipejax.kernels.backends:cpu_products_backend",
}

# The function that tries the kernels for GPUs before the process uses a GPU.
TRY_KERNELS = "pipejax.kernels.backends:try_kernels"

# The module that computes attention in blocks, in training on a GPU.
BLOCK_ATTENTION = "pipejax.kernels.block_attention"

# Tasks by the values of `data.task`: functions that map a `DataConfig` and `grid.row_names` to a `data.Task`.
PAPERS = ("msqa", "kp20k", "kptimes", "wikihowqa", "cnn_dailymail", "pubmed", "sumpubmed", "wikihow")
TASKS = {
    "demo": "pipejax.apps.demo:demo_task",
    "demo_long": "pipejax.apps.demo:demo_task",
    "jsonl": "pipejax.data.own_files:FilesTask",
    "csv": "pipejax.data.own_files:FilesTask",
    **dict.fromkeys(PAPERS, "pipejax.apps.papers:published_task"),
}

# The drafters of `decode.draft` by name: dataclasses that implement `decoding.drafters.Drafter`.
DRAFTERS = {
    "source": "pipejax.decoding.drafters.source:FromSource",
    "jacobi": "pipejax.decoding.drafters.jacobi:Jacobi",
    "model": "pipejax.decoding.drafters.model_drafter:FromModel",
    "spans": "pipejax.apps.teach.spans:Spans",
}

# Rules that make answers follow a format, by the argument that asks for one: subclasses of
# `inference.answer_format.AnswerFormats`.
RULES = {"schema": "pipejax.apps.schemas.row_schema:Schemas"}

# Experiment trackers: a class that is created with the training settings, the run's directory, its step and its id. Its
# method `write` gets each line of the log, and `close` ends the run.
TRACKERS = "pipejax.apps.trackers.trackers:Trackers"

# The function of `pipejax train --dry-run`, which maps a config and the path of a run to an exit code.
DRY_RUN = "pipejax.apps.plan.dry_run:dry_run"

# Formats of weights beside safetensors: functions that map a file to its tensors by name, each a
# `convert.tensor_files.Stored`.
WEIGHT_FORMATS = {
    "torch": "pipejax.apps.weight_formats.tensors:open_torch",
    "flax": "pipejax.apps.weight_formats.tensors:open_msgpack",
}

# The function that writes the README.md of a model in the Hugging Face format.
MODEL_CARD = "pipejax.apps.hub.model_card:write_card"

# The function of `pipejax data prepare`, which writes a published data set in the form that training reads.
PREPARE = "pipejax.apps.papers:prepare"


def find(place: str) -> Any:
    """Imports an entry of a table, "MODULE:NAME" or "MODULE", and returns the object or the module."""
    module, _, name = place.partition(":")
    found = importlib.import_module(module)
    return operator.attrgetter(name)(found) if name else found
