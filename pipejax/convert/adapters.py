"""Adapters of PEFT's: low-rank factors from its directories, and to them.

PEFT keeps A [rank, in] and B [out, rank] of a module and adds s B A to its matrix, with s = lora_alpha / rank, or
lora_alpha / sqrt(rank). Ours are [in, rank] and [rank, out], without a number (`pipejax.model.lora`): s goes into B.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict

from pipejax.convert.tensor_files import ADAPTER, check_finite, open_tensors, read_json
from pipejax.model import lora
from pipejax.model.interface import Backbone
from pipejax.system import Tree
from pipejax.system.errors import UserError
from pipejax.system.files import look

CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "base_model_name_or_path"
PREFIX = "base_model.model."  # of the names of tensors
FOLLOWED = (BASE, "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "rank_pattern", "alpha_pattern")
# Keys that change no logits of a trained adapter.
NEUTRAL = (
    *("task_type", "auto_mapping", "peft_version", "inference_mode", "lora_dropout", "ensure_weight_tying"),
    *("megatron_core", "qalora_group_size", "runtime_config", "eva_config"),
)
# The values that these must have; all other keys have to be null, false or empty.
EXPECTED: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva"),  # others change the matrices that the factors lie beside
}


class Settings(NamedTuple):
    """The part of an adapter's config that says which modules have factors, and how these count."""

    targets: re.Pattern[str]  # of the whole name of a module
    excluded: re.Pattern[str]
    ranks: list[tuple[re.Pattern[str], float]]  # the first that matches counts
    alphas: list[tuple[re.Pattern[str], float]]
    is_rooted: bool  # whether alpha is divided by the root of the rank

    def of(self, name: str) -> tuple[int, float]:
        """The rank of a module, and the number s."""
        rank, alpha = (next(x for known, x in values if known.fullmatch(name)) for values in (self.ranks, self.alphas))
        return int(rank), alpha / (math.sqrt(rank) if self.is_rooted else rank)


def is_adapter(directory: Path) -> bool:
    """Whether the directory holds an adapter of PEFT's."""
    return look(directory / CONFIG) == "file"


def base_of(directory: Path) -> str:
    """The name or the directory of the model that an adapter was trained on; raises a UserError if it says none."""
    name = read_json(directory / CONFIG).get(BASE)
    if not isinstance(name, str) or not name:
        raise UserError(f"{directory / CONFIG}: {BASE}: found {name!r:.60}; expected a name, or --base-model")
    return name


def read(directory: Path, model: Backbone) -> dict[str, np.ndarray]:
    """The factors of an adapter by our paths, in float32."""
    settings = _settings(directory / CONFIG)
    weights, tensors = open_tensors(directory, ADAPTER)
    table, sizes, factors = model.tensors(), model.sizes(), dict[str, np.ndarray]()
    targets = {
        name: path
        for name, path in _modules(model).items()
        if settings.targets.fullmatch(name) and not settings.excluded.fullmatch(name)
    }
    implied = f"as {CONFIG} implies for {len(targets)} modules"
    for name, path in targets.items():
        rank, scale = settings.of(name)
        inputs, outputs = (sizes[axis][1] for axis in table[f"{path}/kernel"][1])
        for end, kind, shape in ((lora.A, "lora_A", (rank, inputs)), (lora.B, "lora_B", (outputs, rank))):
            tensor = tensors.pop(theirs := f"{PREFIX}{name}.{kind}.weight", None)
            if tensor is None or tensor.shape != shape:
                found = f"found shape {[*tensor.shape]}" if tensor else "missing"
                raise UserError(f"{weights}: {theirs}: {found}; expected shape {[*shape]}, {implied}")
            factors[f"{path}/{end}"] = np.array(tensor.read().T, np.float32, order="C")
        factors[f"{path}/{lora.B}"] *= np.float32(scale)
    if tensors or not targets:
        found = f"{min(tensors)}: found a tensor without a place" if tensors else "found no factors"
        raise UserError(f"{weights}: {found}; expected factors of attention and feed-forward alone, {implied}")
    return factors


def written(model: Backbone, params: Tree, base_model: str) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    """The tensors and the config of PEFT's for the factors among parameters."""
    flat, modules, tensors = flatten_dict(params, sep="/"), _modules(model), dict[str, np.ndarray]()
    ranks = {name: flat[f"{path}/{lora.A}"].shape[1] for name, path in modules.items() if f"{path}/{lora.A}" in flat}
    if not ranks:
        raise UserError("--adapter: found no factors; expected a run with train.lora_rank, or a converted adapter")
    for name in ranks:
        for end, kind in ((lora.A, "lora_A"), (lora.B, "lora_B")):
            array = np.asarray(flat[path := f"{modules[name]}/{end}"], np.float32)
            check_finite(f"parameters: {path}", array)
            tensors[f"{PREFIX}{name}.{kind}.weight"] = np.ascontiguousarray(array.T)
    (rank, _), *_ = Counter(ranks.values()).most_common()
    others = {name: own for name, own in ranks.items() if own != rank}
    kinds = {name.rpartition(".")[2] for name in ranks}
    of_kinds = {name for name in modules if name.rpartition(".")[2] in kinds}
    return tensors, {
        "peft_type": "LORA",
        "task_type": "SEQ_2_SEQ_LM",
        BASE: base_model,
        "r": rank,
        "lora_alpha": rank,  # so s is 1
        "rank_pattern": others,
        "alpha_pattern": others,
        "target_modules": sorted(kinds if of_kinds == ranks.keys() else ranks),
        "lora_dropout": 0.0,
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _modules(model: Backbone) -> dict[str, str]:
    """The names in PEFT of the modules that may have factors, and our paths of them."""
    found = {path: name for path, (name, _) in model.tensors().items() if lora.ADAPTED.fullmatch(path)}
    return {name.removesuffix(".weight"): path.removesuffix("/kernel") for path, name in found.items()}


def _settings(file: Path) -> Settings:
    """Those in an adapter_config.json; raises a UserError that names the key if it asks for what is not known."""
    facts = read_json(file)
    for key, value in facts.items():
        if key in EXPECTED and value not in EXPECTED[key]:
            raise UserError(f"{file}: {key}: found {value!r:.60}; expected {' or '.join(map(str, EXPECTED[key]))}")
        if value and key not in (*EXPECTED, *FOLLOWED, *NEUTRAL):
            raise UserError(f"{file}: {key}: found {value!r:.60}; expected none: of PEFT's methods plain LoRA is known")
    targets, excluded = facts.get("target_modules"), facts.get("exclude_modules") or []
    if not targets:
        raise UserError(f"{file}: target_modules: found none; expected names of modules, or an expression")
    everything = isinstance(targets, str) and targets.lower() == "all-linear"
    return Settings(
        _expression(".*" if everything else targets, f"{file}: target_modules"),
        _expression(excluded, f"{file}: exclude_modules"),
        _numbers(facts, "rank_pattern", "r", file),
        _numbers(facts, "alpha_pattern", "lora_alpha", file),
        bool(facts.get("use_rslora")),
    )


def _expression(given: object, where: str) -> re.Pattern[str]:
    """The expression itself, or one for the ends of names in a list."""
    if isinstance(given, list) and all(isinstance(name, str) for name in given):
        given = rf"(.*\.)?({'|'.join(map(re.escape, given))})" if given else "(?!)"
    try:
        if isinstance(given, str):
            return re.compile(given)
    except re.error as error:
        raise UserError(f"{where}: found {given!r:.60} ({error}); expected a regular expression") from error
    raise UserError(f"{where}: found {given!r:.60}; expected a list of names, or an expression")


def _numbers(facts: Mapping[str, object], pattern: str, key: str, file: Path) -> list[tuple[re.Pattern[str], float]]:
    """The number of each expression under a key, and at last of all other modules."""
    own = facts.get(pattern) or {}
    if not isinstance(own, dict):
        raise UserError(f"{file}: {pattern}: found {own!r:.60}; expected an object")
    found = []
    for name, value in [*own.items(), (None, facts.get(key))]:
        where = f"{file}: {key if name is None else f'{pattern}: {name}'}"
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise UserError(f"{where}: found {value!r:.60}; expected a number above 0")
        found.append((_expression(".*" if name is None else rf"(.*\.)?({name})", where), float(value)))
    return found
