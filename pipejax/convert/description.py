"""The files that the Hugging Face format has in addition to the weights.

pipejax.json keeps a run's settings, and README.md shows how to decode. For a run that writes rows there is also
custom_generate/generate.py, with which transformers decodes them: it is `rows_in_torch.py` with the run's settings.

pipejax.json contains only what decoding needs. It has no paths, and no sizes or ids, which config.json has.
"""

import argparse
import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path

from pipejax import config as config_lib
from pipejax import methods
from pipejax.config import Config, DataConfig, DecodeConfig, T5Config, TrainConfig
from pipejax.convert import generation, peft_adapters
from pipejax.convert.generation import Generation
from pipejax.convert.tensor_files import read_json
from pipejax.data import OWN_FILES, PAPERS, make_task
from pipejax.data.text import Template
from pipejax.data.tokenizer import Affixes, Tokenizer, source_affixes
from pipejax.methods import InTorch, prefix_ids, separator_ids, tells_rows_apart
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
CARD_TEXT = """\
---
{metadata}---

# {name}

{what}
{files}; `pipejax.json` keeps the settings that transformers does not know.

## With pipejax

```shell
pipejax convert from-hf DIRECTORY checkpoint  # this directory
pipejax decode --checkpoint checkpoint --input sources.jsonl --output answers.jsonl{named}
```

A line of `sources.jsonl` is `{line}`.{made}

## With transformers and PyTorch

{limit}

```python
{imports}from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("DIRECTORY")  # this directory
model = AutoModelForSeq2SeqLM.from_pretrained("DIRECTORY")
source = {source}
{ids}
{rows}
```
{scores}"""
FILES = """\
`pipejax convert to-hf` wrote this directory. `config.json`, `generation_config.json` and the weights are as
transformers reads them"""
ADAPTER_FILES = (
    "`pipejax convert to-hf --adapter` wrote this directory: low-rank factors (LoRA) "
    "for the weights of {base}.\n`adapter_config.json` and the factors are as peft "
    "reads them; where it is installed, transformers loads both"
)
AS_IT_ADDS = """\
ids = tokenizer(source, truncation=True, max_length={most}, return_token_type_ids=False, return_tensors="pt")"""
AS_IT_LEARNED = """\
text_ids = tokenizer(source, add_special_tokens=False, truncation=True, max_length={most})["input_ids"]
ids = {{"input_ids": torch.tensor([[*{prefix}, *text_ids, *{suffix}]])}}  # not what the tokenizer adds by itself"""
WHOLE = """\
text = tokenizer.decode(model.generate(**ids{settings})[0], skip_special_tokens=True)
rows = {rows}"""
SIDE_BY_SIDE = """\
how = {"custom_generate": "DIRECTORY", "trust_remote_code": True, "return_dict_in_generate": True}
answer = model.generate(**ids, **how)
rows = tokenizer.batch_decode(answer.rows[0], skip_special_tokens=True)
text = tokenizer.decode(answer.sequences[0], skip_special_tokens=True)"""
SCORES_TEXT = """
## Scores

{examples} examples, {steps:.1f} decoder steps an answer, by `{command}`:

| | |
|---|--:|
{table}
"""
BY_CUSTOM_GENERATE = (
    "`custom_generate/generate.py` writes the rows side by side, as pipejax does; "
    "`trust_remote_code` lets transformers run\nthat file. Without it `generate` "
    "writes only the first row."
)


@dataclasses.dataclass(frozen=True)
class ModelOrigin:
    """Facts about a model that its run does not record."""

    base_model: str = ""  # the hub name of the model whose weights the training started from
    scores: Mapping[str, object] | None = None  # in the format of `pipejax evaluate --json`
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
    is_adapter = peft_adapters.is_adapter(directory)
    affixes, lines = None, list[str]()
    if tokenizer is not None and config.model is not None:
        learned = source_affixes(tokenizer, config.model, config.data.special_tokens)
        if learned != tokenizer.affixes:
            affixes = learned
            lines.append(
                f"transformers adds {tokenizer.affixes}, the run was trained with {learned}; "
                f"the code in {CARD} adds the latter"
            )
    text = card(name, config, tokenizer=tokenizer is not None, origin=origin, is_adapter=is_adapter, affixes=affixes)
    (directory / CARD).write_text(text, encoding="utf-8")
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
    if of_rules and elsewhere:
        keys = " and ".join(f"decode.{key}" for key in of_rules)
        lines.append(f"{keys}: only pipejax decodes the rows of this directory with it; transformers ignores it")
    if config.decode.draft == "model":
        lines.append(f"decode.draft: {FILE} has none instead of model, because the draft model is not in the directory")
    if origin.scores is not None and not _scores_in(origin.scores):
        found = f"no {', '.join(_missing_keys(origin.scores)) or 'score'} in the file"
        lines.append(f"--scores: {CARD} has no scores: found {found}; expected the output of `pipejax evaluate --json`")
    return lines


def custom_generate(config: Config, tokenizer: Tokenizer | None) -> str | None:
    """Returns the text of `rows_in_torch.py` with the settings of a run; None if its method is not supported."""
    settings = _in_torch(config, tokenizer=tokenizer is not None)
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


def _in_torch(config: Config, *, tokenizer: bool) -> InTorch | None:
    """Returns the settings of `rows_in_torch.py`, or None if it cannot decode this run.

    It supports only T5's decoder, and names of rows only with a tokenizer.
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


def card(
    name: str,
    config: Config,
    *,
    tokenizer: bool,
    origin: ModelOrigin = UNKNOWN,
    is_adapter: bool = False,
    affixes: Affixes | None = None,
) -> str:
    """Returns the text of README.md.

    Args:
      name: the model's name.
      config: the run's config.
      tokenizer: whether the directory has a tokenizer.
      origin: the facts that the run does not record.
      is_adapter: whether the directory has only factors.
      affixes: the special ids of a source, if the tokenizer adds others.
    """
    from huggingface_hub import EvalResult, ModelCardData

    data = config.data
    template, between, core = data.source_template, data.separator, data.separator.strip(" ")
    if data.task in PAPERS:  # the task has its own template
        template = make_task(data).template
    fields = (
        dict.fromkeys(Template(template, key="data.source_template").fields, "...") if template else {"source": "..."}
    )
    method, never = methods.trained(config), config.method is None and config.train.method == "none"
    what = "A T5 that was converted and not trained since." if never else method.about
    named = ""
    if config.method is not None:
        name_of = config_lib.described(config.method)["class"]
        named = f" \\\n    --set method={name_of}  # where Python finds that class"
    elif not method.parts_text:
        what += f" pipejax joins rows with {between!r}."
    rows, settings = "[text]", ""
    if is_adapter:  # transformers would not read a generation_config.json in an adapter's directory
        said = {key: x for key, x in generation.of_run(config).items() if key not in generation.IDS}
        settings = "".join(f", {key}={x!r}" for key, x in said.items())
    in_torch = _in_torch(config, tokenizer=tokenizer) is not None
    if "generate" in method.can and tells_rows_apart(between) and not never:
        rows = f"[row.strip() for row in text.split({core!r})]"
    found = _scores_in(origin.scores)
    scored = str((origin.scores or {}).get("task"))
    results = [EvalResult("text2text-generation", scored, scored, key, value) for key, value in found.items()]
    metadata = ModelCardData(
        base_model=origin.base_model or None,
        library_name="peft" if is_adapter else "transformers",
        tags=["text2text-generation", "pipejax", *(["custom_generate", "pipelined-decoding"] if in_torch else [])],
        model_name=name,
        eval_results=None if scored in OWN_FILES else results or None,  # the hub requires the name of the data set
        license=origin.license or None,
    )
    return CARD_TEXT.format(
        metadata=metadata.to_yaml() + "\n",
        name=name,
        files=ADAPTER_FILES.format(base=origin.base_model) if is_adapter else FILES,
        what=what if tokenizer else (f"{what} The directory has no tokenizer, so sources must be token ids."),
        line=json.dumps(fields),
        made=f" The source is made of it by the template {template!r}." if template else "",
        limit=BY_CUSTOM_GENERATE if in_torch else method.generated,
        named=named,
        source=f"{template!r}.format_map({fields!r})" if template else repr("..."),
        imports="import torch\n" if affixes else "",
        ids=AS_IT_ADDS.format(most=data.max_source)
        if affixes is None
        else AS_IT_LEARNED.format(
            most=data.max_source - len(affixes.prefix) - len(affixes.suffix),
            prefix=[*affixes.prefix],
            suffix=[*affixes.suffix],
        ),
        rows=SIDE_BY_SIDE if in_torch else WHOLE.format(rows=rows, settings=settings),
        scores=_scores_section(origin.scores, found),
    )


def _scores_in(given: Mapping[str, object] | None) -> dict[str, float]:
    """Returns the scores in the output of `pipejax evaluate --json`: the numbers between "metric" and "steps"."""
    keys = [*(given or {})]
    if given is None or _missing_keys(given):
        return {}
    between = keys[keys.index("metric") + 1 : keys.index("steps")]
    return {key: round(score, 2) for key in between if isinstance(score := given[key], int | float)}


def _missing_keys(given: Mapping[str, object]) -> list[str]:
    return [key for key in ("metric", "steps", "examples", "task", "split") if key not in given]


def _scores_section(given: Mapping[str, object] | None, scores: Mapping[str, float]) -> str:
    """Returns the section of README.md with the scores and their command, or "" without scores."""
    if not given or not scores:
        return ""
    told = "\n".join(f"| {key} | {value:.2f} |" for key, value in scores.items())
    command = f"pipejax evaluate --checkpoint checkpoint --task {given['task']} --split {given['split']}"
    return SCORES_TEXT.format(examples=given["examples"], steps=given["steps"], command=command, table=told)


def _weights(directory: Path) -> Path:
    return directory / (peft_adapters.WEIGHTS if peft_adapters.is_adapter(directory) else WEIGHTS)
