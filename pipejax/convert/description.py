"""The files that the Hugging Face format has in addition to the weights.

pipejax.json keeps a run's settings, and README.md shows how to decode. For a run that writes rows there is also
custom_generate/generate.py, with which transformers decodes the rows: `rows_in_torch.py` with the run's settings.

pipejax.json contains only the settings that decoding needs. It has no paths, and no sizes or ids, which are in
config.json.
"""

import argparse
import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path

from pipejax import config as config_lib
from pipejax import methods, registry
from pipejax.config import Config, DataConfig, DecodeConfig, T5Config, TrainConfig
from pipejax.convert import generation, peft_adapters
from pipejax.convert.generation import Generation
from pipejax.convert.tensor_files import read_json
from pipejax.data.tokenizer import Tokenizer, source_affixes
from pipejax.methods import InTorch, prefix_ids, separator_ids
from pipejax.model.backbone import Backbone
from pipejax.system import strict_json
from pipejax.system.errors import UserError
from pipejax.system.files import digest_of, look

FILE, CARD, WEIGHTS = "pipejax.json", "README.md", "model.safetensors"
GENERATE = "custom_generate/generate.py"  # the path where transformers looks for it
FORMAT = 1
DATA = (  # the keys of `data` that determine how texts are built and split, and how long they may be
    *("task", "source_template", "targets", "rows", "delimiter", "metric"),
    *("special_tokens", "max_source", "max_target", "separator"),
)


@dataclasses.dataclass(frozen=True)
class ModelOrigin:
    """Facts about a model that its run does not record."""

    base_model: str = ""  # the hub name of the model whose weights the training started from
    scores: Mapping[str, object] | None = None  # the scores, in the format of `pipejax evaluate --json`
    license: str = ""  # the hub's name of the license


UNKNOWN = ModelOrigin()


def add_origin(parser: argparse.ArgumentParser) -> None:
    """Adds flags for the facts in README.md that a run does not record."""
    parser.add_argument(
        "--base-model", default="", metavar="NAME", help="hub id of the model that the training started from"
    )
    parser.add_argument("--license", default="", metavar="NAME", help="license for the README.md, such as apache-2.0")
    parser.add_argument(
        "--scores", default="", metavar="FILE", help="output of `pipejax evaluate --json`, for the README.md"
    )


def write_files(
    directory: Path, name: str, config: Config, *, tokenizer: Tokenizer | None, origin: ModelOrigin = UNKNOWN
) -> list[str]:
    """Writes the files beside model.safetensors; returns remarks for the log, one per line."""
    facts = strict_json.loads(config_lib.to_json(kept(config)))
    sections = {section: facts[section] for section in ("grid", "decode", "method", "auxiliary") if section in facts}
    trained = ("method", "freeze") if "auxiliary" in facts else ("method",)
    sections |= {"data": {key: facts["data"][key] for key in DATA}}
    sections |= {"train": {key: facts["train"][key] for key in trained}}
    values = {"format": FORMAT, "weights": digest_of(_weights(directory)), "config": sections}
    (directory / FILE).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    affixes, lines = None, list[str]()
    if tokenizer is not None and config.model is not None:
        learned = source_affixes(tokenizer, config.model, config.data.special_tokens)
        if learned != tokenizer.affixes:
            affixes = learned
            lines.append(
                f"transformers adds {tokenizer.affixes}, the run was trained with {learned}; "
                f"the code in {CARD} adds the latter"
            )
    write_card = registry.find(registry.MODEL_CARD)
    remarks: list[str] = write_card(directory, name, config, tokenizer is not None, origin, affixes)
    if (program := custom_generate(config, tokenizer)) is not None:
        (directory / GENERATE).parent.mkdir()
        (directory / GENERATE).write_text(program, encoding="utf-8")
        lines.append(f"{GENERATE} in the directory writes rows in transformers; {CARD} describes how")
    elif "generate" not in (method := methods.trained(config)).can:
        said = method.generated.replace("`generate`", "transformers' generate").rstrip(".")
        lines.append(f"{said}; {CARD} describes how to decode with pipejax")
    if config.decode.rules:
        lines.append(f"decode.rules: {FILE} has none, because the classes are not in the directory")
    elsewhere = program is not None or "generate" not in methods.trained(config).can
    of_rules = [key for key in generation.OF_RULES if getattr(config.decode, key) != getattr(DecodeConfig, key)]
    keys = " and ".join(f"decode.{key}" for key in of_rules)
    if keys and elsewhere:
        lines.append(f"{keys}: only pipejax decodes the rows of this directory with it; transformers ignores it")
    elif keys and config.train.method != "none":  # pipejax exempts separators if it trained the weights
        by_row = config.decode.repetition_scope == "row"
        counts = "the tokens of separators" + (", and of the rows before the current one" if by_row else "")
        lines.append(f"{keys}: in transformers {counts} count as repeated tokens; in pipejax they do not")
    if config.decode.limit != "none":
        lines.append(f"decode.limit: only pipejax limits answers to {config.decode.limit}; transformers ignores it")
    if config.decode.temperature and elsewhere:
        lines.append(
            "decode.temperature: only pipejax samples the rows of this directory; transformers writes them greedily"
        )
    if config.decode.draft == "model":
        lines.append(f"decode.draft: {FILE} has none instead of model, because the draft model is not in the directory")
    return lines + remarks


def custom_generate(config: Config, tokenizer: Tokenizer | None) -> str | None:
    """Returns the text of `rows_in_torch.py` with the settings of a run; None if that file cannot decode the run."""
    settings = settings_in_torch(config, tokenizer=tokenizer is not None)
    if settings is None:
        return None
    values: dict[str, object] = {**settings, "row_names": []}
    ends = config.model.end_token_ids if config.model else ()
    if tokenizer is not None:
        names = [[*prefix_ids(tokenizer, name, "grid.row_names", ends)] for name in settings["row_names"]]
        values |= {"row_names": names, "separator": separator_ids(tokenizer, config.data.separator)}
    text = Path(__file__).with_name("rows_in_torch.py").read_text(encoding="utf-8")
    for key, value in values.items():
        text, count = re.subn(rf"^({key.upper()}(?:: [^=]+)?) = \S+", rf"\1 = {value!r}", text, flags=re.MULTILINE)
        assert count == 1, key
    return text


def settings_in_torch(config: Config, *, tokenizer: bool) -> InTorch | None:
    """Returns the settings of `rows_in_torch.py` for a run, or None if that file cannot decode the run.

    `rows_in_torch.py` supports only T5's decoder, and names of rows only with a tokenizer.
    """
    settings, knows = methods.trained(config).in_torch, isinstance(config.model, T5Config)
    return None if settings is None or not knows or (settings["row_names"] and not tokenizer) else settings


def kept(config: Config) -> Config:
    """Returns the config with only the settings that pipejax.json keeps."""
    decode = dataclasses.replace(config.decode, draft_checkpoint="")
    if decode.draft == "model":
        decode = dataclasses.replace(decode, draft="none", trace=False)
    decode = dataclasses.replace(decode, rules="")  # the classes are not in the directory
    return Config(
        model=config.model,
        method=config.method,
        grid=config.grid,
        data=DataConfig(**{key: getattr(config.data, key) for key in DATA}),
        auxiliary=config.auxiliary,
        train=TrainConfig(
            method=config.train.method, freeze="none" if config.auxiliary is None else config.train.freeze
        ),
        decode=decode,
    )


def read_settings(directory: Path, model: Backbone, generate: Generation) -> tuple[Config, list[str]] | None:
    """Reads the config of the run that a directory was exported from.

    Returns:
      The config, and remarks for the log, one per line; None if the directory has no pipejax.json.
    """
    file, weights = directory / FILE, _weights(directory)
    if not look(file):
        return None
    values = read_json(file)
    if values.get("format") != FORMAT:
        raise UserError(
            f"{file}: format",
            found=f"{values.get('format')!r:.40}",
            expected=f"{FORMAT}, the format of this version of pipejax",
            hint="without this file only the weights are converted",
        )
    saved = config_lib.from_saved(values.get("config"), where=f"{file}: config")
    config = dataclasses.replace(kept(saved), model=model)
    config_lib.check(config, where=f"{file}: config")
    lines = [f"{file}: followed for method ({config.train.method}), grid, template, separator and decode settings"]
    if look(weights) != "file" or digest_of(weights) != values.get("weights"):
        lines.append(
            f"{file}: written for other weights; correct only if these weights were trained with the same settings"
        )
    theirs, ours = generate.followed(), Generation(generate.file, generation.of_run(config)).followed()
    others = [key for key in theirs if key in generate.values and theirs[key] != ours.get(key)]
    if others := [f"{key}={json.dumps(generate.values[key])[:40]}" for key in [*others, *generate.lost()]]:
        lines.append(f"{generate.file}: ignored, since {FILE} has priority: {', '.join(others)}")
    return config, lines


def _weights(directory: Path) -> Path:
    return directory / (peft_adapters.WEIGHTS if peft_adapters.is_adapter(directory) else WEIGHTS)
