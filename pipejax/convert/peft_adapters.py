"""Reads and writes PEFT adapters: low-rank factors in a directory.

PEFT stores A [rank, in] and B [out, rank] of a module and adds s B A to its matrix, with s = lora_alpha / rank, or
lora_alpha / sqrt(rank). Our factors are [in, rank] and [rank, out], without a scale (`pipejax.model.lora`), so s is
multiplied into B.
"""

import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from flax.traverse_util import flatten_dict

from pipejax.convert.tensor_files import ADAPTER, check_finite, open_tensors, read_json
from pipejax.model import lora
from pipejax.model.backbone import Backbone
from pipejax.system import Tree, strict_json
from pipejax.system.cli import note
from pipejax.system.errors import UserError
from pipejax.system.files import look

CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "base_model_name_or_path"
PREFIX = "base_model.model."  # the beginning of the tensors' names
FOLLOWED = (
    BASE,
    "revision",
    "r",
    "lora_alpha",
    "use_rslora",
    "target_modules",
    "exclude_modules",
    "rank_pattern",
    "alpha_pattern",
)
# Settings that do not change the logits of a trained adapter.
NEUTRAL = (
    *("task_type", "auto_mapping", "peft_version", "inference_mode", "lora_dropout", "ensure_weight_tying"),
    *("megatron_core", "qalora_group_size", "runtime_config", "eva_config", "corda_config"),
    *("loftq_config", "lora_ga_config", "fan_in_fan_out"),  # `fan_in_fan_out` applies to layers that T5 does not have
)
# The values that these settings must have; all other settings must be null, false or empty.
EXPECTED: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    # Other initialisations change the matrices that the factors are added to.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica"),
}
MATCH = """
import json, re, sys
expressions, names = json.load(sys.stdin)
for expression in expressions:
    try:
        print(json.dumps([name for name in names if re.fullmatch(expression, name)]))
    except (re.error, RecursionError, OverflowError) as error:
        print(json.dumps(str(error)))
"""
LONGEST, SECONDS = 2**16, 3  # limits for an adapter's regular expressions: characters, and seconds of matching


def is_adapter(directory: Path) -> bool:
    """Returns whether a directory is a PEFT adapter."""
    return look(directory / CONFIG) == "file"


def base_of(directory: Path) -> str:
    """Returns the directory or the hub id of the model that an adapter was trained on.

    A hub id has the form NAME@REVISION if the adapter names a revision.
    """
    facts = read_json(directory / CONFIG)
    name, revision = facts.get(BASE), facts.get("revision")
    if not isinstance(name, str) or not name:
        raise UserError(f"{directory / CONFIG}: {BASE}", found=f"{name!r:.60}", expected="a name, or --base-model")
    if revision and not isinstance(revision, str):
        raise UserError(f"{directory / CONFIG}: revision", found=f"{revision!r:.60}", expected="a name")
    return name if not revision or revision == "main" or look(name) else f"{name}@{revision}"


def read_factors(directory: Path, model: Backbone) -> dict[str, np.ndarray]:
    """Reads the factors of an adapter as parameters by path.

    Raises:
      UserError: the adapter's settings or its tensors do not fit the model.
    """
    modules, formerly = _modules(model), _modules(model, in_files=True)
    targets = _targets(directory / CONFIG, [*(modules | formerly)])
    weights, tensors = open_tensors(directory, ADAPTER)
    images = tuple(f"{PREFIX}{name}" for name in model.image_tensors)
    if left := [name for name in tensors if name.startswith(images)]:
        note(f"{weights}: left out {len(left)} factors of the vision tower, because sources are text only")
    tensors = {name: stored for name, stored in tensors.items() if not name.startswith(images)}
    if any(f"{PREFIX}{name}.lora_A.weight" in tensors for name in formerly.keys() - modules.keys()):
        modules = formerly
        note(
            f"{weights}: its modules have names of an earlier release of transformers; PEFT may skip modules "
            "with these names without a warning; pipejax convert to-hf --adapter writes the current names"
        )
    targets = {name: target for name, target in targets.items() if name in modules}
    table, sizes, factors = model.tensors(), model.sizes(), dict[str, np.ndarray]()
    implied = f"as {CONFIG} implies for {len(targets)} modules"
    for name, (rank, scale) in targets.items():
        path = modules[name]
        inputs, outputs = (sizes[axis][1] for axis in table[f"{path}/kernel"][1])
        for end, kind, shape in ((lora.A, "lora_A", (rank, inputs)), (lora.B, "lora_B", (outputs, rank))):
            tensor = tensors.pop(theirs := f"{PREFIX}{name}.{kind}.weight", None)
            if tensor is None or tensor.shape != shape:
                problem = f"found shape {[*tensor.shape]}" if tensor else "missing"
                raise UserError(f"{weights}: {theirs}", problem, expected=f"shape {[*shape]}, {implied}")
            factors[f"{path}/{end}"] = np.array(tensor.read().T, np.float32, order="C")
        factors[f"{path}/{lora.B}"] *= np.float32(scale)
    if tensors or not targets:
        raise UserError(
            f"{weights}: {min(tensors)}" if tensors else weights,
            found="a tensor that the config does not name" if tensors else "no factors",
            expected=f"factors of attention and feed-forward layers only, {implied}",
        )
    return factors


def to_peft(model: Backbone, params: Tree, base_model: str) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    """Converts the factors among the parameters to PEFT's tensors and config.

    Args:
      model: the architecture.
      params: the parameters with factors.
      base_model: the name of the model that the adapter belongs to.
    """
    flat, modules, tensors = flatten_dict(params, sep="/"), _modules(model), dict[str, np.ndarray]()
    ranks = {name: flat[f"{path}/{lora.A}"].shape[1] for name, path in modules.items() if f"{path}/{lora.A}" in flat}
    if not ranks:
        raise UserError("--adapter", found="no factors", expected="a run with train.lora_rank, or a converted adapter")
    for name in ranks:
        for end, kind in ((lora.A, "lora_A"), (lora.B, "lora_B")):
            array = np.asarray(flat[path := f"{modules[name]}/{end}"], np.float32)
            check_finite(f"parameters: {path}", array)
            tensors[f"{PREFIX}{name}.{kind}.weight"] = np.ascontiguousarray(array.T)
    (rank, _), *_ = Counter(ranks.values()).most_common()
    others = {name: own for name, own in ranks.items() if own != rank}
    kinds = {name.rpartition(".")[2] for name in ranks}
    of_kinds = {name for name in modules if name.rpartition(".")[2] in kinds}
    by_kind = of_kinds == ranks.keys() and not model.image_tensors  # an image encoder has modules of the same kinds
    return tensors, {
        "peft_type": "LORA",
        "task_type": "SEQ_2_SEQ_LM",
        BASE: base_model,
        "r": rank,
        "lora_alpha": rank,  # makes the scale s equal to 1
        "rank_pattern": others,
        "alpha_pattern": others,
        "target_modules": sorted(kinds if by_kind else ranks),
        "lora_dropout": 0.0,
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _modules(model: Backbone, *, in_files: bool = False) -> dict[str, str]:
    """Returns the PEFT names of the modules that may have factors, with their parameter paths.

    `in_files`: use the tensor names of the base's files, as adapters of earlier transformers releases may do.
    """
    found = {path: name for path, (name, _) in model.tensors().items() if lora.ADAPTED.fullmatch(path)}
    names = {path: name if in_files else model.module_name(name) for path, name in found.items()}
    return {name.removesuffix(".weight"): path.removesuffix("/kernel") for path, name in names.items()}


def _targets(file: Path, names: list[str]) -> dict[str, tuple[int, float]]:
    """Returns the rank and the scale s of each module with factors, by the module's name.

    Raises:
      UserError: the config has an unknown setting or value.
    """
    facts = read_json(file)
    for key, value in facts.items():
        if key in EXPECTED and value not in EXPECTED[key]:
            raise UserError(f"{file}: {key}", found=f"{value!r:.60}", expected=" or ".join(map(str, EXPECTED[key])))
        is_plain = value in (None, "", [], {}) or value is False
        if not is_plain and key not in (*EXPECTED, *FOLLOWED, *NEUTRAL):
            raise UserError(
                f"{file}: {key}",
                found=f"{value!r:.60}",
                expected="no value: plain LoRA is the only PEFT method that pipejax supports",
            )
    targets, excluded = facts.get("target_modules"), facts.get("exclude_modules") or []
    if not targets:
        raise UserError(f"{file}: target_modules", found="none", expected="module names or a regular expression")
    everything = isinstance(targets, str) and targets.lower() == "all-linear"
    ranks, alphas = _numbers(facts, "rank_pattern", "r", file), _numbers(facts, "alpha_pattern", "lora_alpha", file)
    given = {"target_modules": names if everything else targets, "exclude_modules": excluded}
    given |= {f"{key}: {name}": rf"(.*\.)?({name})" for key, known in (ranks, alphas) for name in known if name}
    matched = _matched(given, names, file)
    found = {}
    for name in names:
        if name in matched["target_modules"] and name not in matched["exclude_modules"]:
            rank, alpha = (
                next(x for part, x in known.items() if not part or name in matched[f"{key}: {part}"])
                for key, known in (ranks, alphas)
            )
            found[name] = int(rank), alpha / (math.sqrt(rank) if facts.get("use_rslora") else rank)
    return found


def _matched(given: Mapping[str, object], names: list[str], file: Path) -> dict[str, set[str]]:
    """Returns the module names that each setting selects.

    A list selects names by their ends, an expression by a full match. The expressions are matched in another process,
    because matching may take arbitrarily long and cannot be interrupted within this process.
    """
    found, expressions = dict[str, set[str]](), dict[str, str]()
    for key, value in given.items():
        if isinstance(value, str):
            expressions[key] = value
        elif isinstance(value, list) and all(isinstance(end, str) for end in value):
            found[key] = {name for name in names if any(f".{name}".endswith(f".{end}") for end in value)}
        else:
            raise UserError(f"{file}: {key}", found=f"{value!r:.60}", expected="a list of names or an expression")
    if not expressions:
        return found
    if (size := sum(map(len, expressions.values()))) > LONGEST:
        raise UserError(file, found=f"expressions of {size:,} characters", expected=f"at most {LONGEST:,}")
    told, command = json.dumps([[*expressions.values()], names]), [sys.executable, "-I", "-S", "-c", MATCH]
    try:
        done = subprocess.run(command, input=told, capture_output=True, text=True, timeout=SECONDS, check=True)
    except subprocess.SubprocessError as error:
        key = max(expressions, key=lambda key: len(expressions[key]))
        raise UserError(
            f"{file}: {key}",
            found=f"{expressions[key]!r:.60}; matching this or another expression took more than {SECONDS} s",
            expected="a simpler expression",
        ) from error
    for (key, value), line in zip(expressions.items(), done.stdout.splitlines(), strict=True):
        if isinstance(own := strict_json.loads(line), str):
            raise UserError(f"{file}: {key}", found=f"{value!r:.60} ({own})", expected="a regular expression")
        found[key] = set(own)
    return found


def _numbers(facts: Mapping[str, object], pattern: str, key: str, file: Path) -> tuple[str, dict[str, float]]:
    """Returns `pattern`, and a number for each pattern of module names; the pattern "" has the default.

    Args:
      facts: the settings of the adapter.
      pattern: the setting with the exceptions, the numbers by pattern.
      key: the setting with the default.
      file: the file of the settings, for messages.

    Raises:
      UserError: a value is not a positive number.
    """
    own = facts.get(pattern) or {}
    if not isinstance(own, dict):
        raise UserError(f"{file}: {pattern}", found=f"{own!r:.60}", expected="an object")
    found = {name: value for name, value in own.items() if name} | {"": facts.get(key)}
    for name, value in found.items():
        where = f"{pattern}: {name:.60}" if name else key
        kinds = (int,) if key == "r" else (int, float)
        if not where.isprintable() or type(value) not in kinds or not 0 < value < 2**31:
            expected = "a whole number above 0" if key == "r" else "a number above 0"
            raise UserError(f"{file}: {where}", found=f"{value!r:.60}", expected=expected)
    return pattern, found
