"""The files beside the weights for Hugging Face: pipejax.json keeps a run's settings, README.md says how to decode.

pipejax.json holds what decoding needs and nothing else: no path, and no size or id, which config.json has.
"""

import dataclasses
import hashlib
import json
from pathlib import Path

from pipejax import config as config_lib
from pipejax import methods
from pipejax.config import Config, DataConfig, TrainConfig
from pipejax.convert import generation
from pipejax.convert.generation import Generation
from pipejax.convert.tensor_files import read_json
from pipejax.data import PUBLISHED, make_task
from pipejax.data.text import Template
from pipejax.methods import tells_rows_apart
from pipejax.model.interface import Backbone
from pipejax.system.errors import UserError
from pipejax.system.files import look

FILE, CARD, WEIGHTS = "pipejax.json", "README.md", "model.safetensors"
FORMAT = 1
DATA = (  # the keys of `data` that say how texts are made and parted, and how long they may be
    *("task", "source_template", "targets", "rows", "delimiter", "metric"),
    *("max_source", "max_target", "separator"),
)
CARD_TEXT = """\
# {name}

{what}
`pipejax convert to-hf` wrote this directory. `config.json`, `generation_config.json` and the weights are as
transformers reads them; `pipejax.json` keeps the settings that transformers does not know.

## With pipejax

```shell
pipejax convert from-hf DIRECTORY checkpoint  # this directory
pipejax decode --checkpoint checkpoint --input sources.jsonl --output answers.jsonl{named}
```

A line of `sources.jsonl` is `{line}`.{made}

## With transformers

{limit}

```python
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("DIRECTORY")  # this directory
model = AutoModelForSeq2SeqLM.from_pretrained("DIRECTORY")
source = {source}
ids = tokenizer(source, truncation=True, max_length={max_source}, return_tensors="pt")
text = tokenizer.decode(model.generate(**ids)[0], skip_special_tokens=True)
rows = {rows}
```
"""


def write(directory: Path, name: str, config: Config, *, tokenizer: bool) -> list[str]:
    """Writes both files beside model.safetensors; returns a line for each thing to say of them.

    Args:
      directory: where to.
      name: of the model, for people.
      config: of its run.
      tokenizer: whether one lies there.

    Raises:
      OSError: a file cannot be written.
    """
    facts = json.loads(config_lib.to_json(kept(config)))
    sections = {section: facts[section] for section in ("grid", "decode", "method") if section in facts}
    sections |= {"data": {key: facts["data"][key] for key in DATA}, "train": {"objective": config.train.objective}}
    values = {"format": FORMAT, "weights": _digest(directory / WEIGHTS), "config": sections}
    (directory / FILE).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (directory / CARD).write_text(card(name, config, tokenizer=tokenizer), encoding="utf-8")
    lines = []
    if "generate" not in (method := methods.trained(config)).can:
        said = method.generated.replace("`generate`", "transformers' generate").rstrip(".")
        lines.append(f"{said}; {CARD} there says how to decode with pipejax")
    if config.decode.draft == "model":
        lines.append(f"decode.draft: {FILE} says none instead of model: the T5 that drafts is not in the directory")
    return lines


def kept(config: Config) -> Config:
    """The part of a run's config that decoding needs, without its paths."""
    decode = dataclasses.replace(config.decode, draft_checkpoint="")
    if decode.draft == "model":
        decode = dataclasses.replace(decode, draft="none", trace=False)
    return Config(
        model=config.model,
        method=config.method,
        grid=config.grid,
        data=DataConfig(**{key: getattr(config.data, key) for key in DATA}),
        train=TrainConfig(objective=config.train.objective),
        decode=decode,
    )


def read(directory: Path, model: Backbone, generate: Generation) -> tuple[Config, list[str]] | None:
    """The config of the run that a directory is from, and a line for each thing to say of it; None: there is no file.

    Args:
      directory: of config.json and the weights.
      model: the architecture there.
      generate: the settings of `generate` there.

    Raises:
      UserError: the file is damaged, of another version, or does not go with the architecture.
    """
    file, weights = directory / FILE, directory / WEIGHTS
    if not look(file):
        return None
    values = read_json(file)
    if values.get("format") != FORMAT:
        raise UserError(
            f"{file}: format: found {values.get('format')!r:.40}; expected {FORMAT}: another version of pipejax wrote "
            "it (without this file the weights alone are converted)"
        )
    saved = config_lib.from_json(json.dumps(values.get("config")), where=f"{file}: config")
    config = dataclasses.replace(kept(saved), model=model)
    config_lib.check(config, where=f"{file}: config")
    lines = [
        f"{file}: followed for objective ({config.train.objective}), grid, template, separator and decode settings"
    ]
    if look(weights) != "file" or _digest(weights) != values.get("weights"):
        lines.append(f"{file}: was written beside other weights; right only if these were trained for the same")
    theirs, ours = generate.followed(), Generation(generate.file, generation.written(config)).followed()
    others = [key for key in theirs if key in generate.values and theirs[key] != ours.get(key)]
    if others := [f"{key}={json.dumps(generate.values[key])[:40]}" for key in [*others, *generate.lost()]]:
        lines.append(f"{generate.file}: not followed, since {FILE} goes before it: {', '.join(others)}")
    return config, lines


def card(name: str, config: Config, *, tokenizer: bool) -> str:
    """The text of README.md; arguments as of `write`."""
    data = config.data
    template, between, core = data.source_template, data.separator, data.separator.strip(" ")
    if data.task in PUBLISHED:  # it has a template of its own
        template = make_task(data).template
    fields = (
        dict.fromkeys(Template(template, key="data.source_template").fields, "...") if template else {"source": "..."}
    )
    method, never = methods.trained(config), config.method is None and config.train.objective == "none"
    what = "A T5 that was converted and not trained since." if never else method.about
    named = ""
    if config.method is not None:
        name_of = config_lib.described(config.method)["class"]
        named = f" \\\n    --set method={name_of}  # where Python finds that class"
    elif not method.parts_text:
        what += f" pipejax joins rows with {between!r}."
    rows = "[text]"
    if "generate" in method.can and tells_rows_apart(between) and not never:
        rows = f"[row.strip() for row in text.split({core!r})]"
    return CARD_TEXT.format(
        name=name,
        what=what if tokenizer else f"{what} There is no tokenizer here: sources have to be token ids.",
        line=json.dumps(fields),
        made=f" The source is made of it by the template {template!r}." if template else "",
        limit=method.generated,
        named=named,
        source=f"{template!r}.format_map({fields!r})" if template else repr("..."),
        max_source=data.max_source,
        rows=rows,
    )


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
