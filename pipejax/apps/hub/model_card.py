"""The README.md of a model in the Hugging Face format: its metadata, how to decode with it, and its scores."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipejax import config as config_lib
from pipejax import methods
from pipejax.config import Config
from pipejax.convert import generation, peft_adapters
from pipejax.convert.description import CARD, UNKNOWN, ModelOrigin, settings_in_torch
from pipejax.data import OWN_FILES, PAPERS, make_task
from pipejax.data.text import Template
from pipejax.data.tokenizer import Affixes
from pipejax.methods import tells_rows_apart
from pipejax.methods.sequential import separator_pattern

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
ids = {{"input_ids": torch.tensor([[*{prefix}, *text_ids, *{suffix}]])}}  # not what the tokenizer adds by itself
ids["attention_mask"] = torch.ones_like(ids["input_ids"])"""
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


def write_card(
    directory: Path, name: str, config: Config, tokenizer: bool, origin: ModelOrigin, affixes: Affixes | None
) -> list[str]:
    """Writes README.md; see `card` for the arguments. Returns remarks for the log, one per line."""
    is_adapter = peft_adapters.is_adapter(directory)
    text = card(name, config, tokenizer=tokenizer, origin=origin, is_adapter=is_adapter, affixes=affixes)
    (directory / CARD).write_text(text, encoding="utf-8")
    if origin.scores is None or _scores_in(origin.scores):
        return []
    found = f"no {', '.join(_missing_keys(origin.scores)) or 'score'} in the file"
    return [f"--scores: {CARD} has no scores: found {found}; expected the output of `pipejax evaluate --json`"]


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
    template, between = data.source_template, data.separator
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
    in_torch = settings_in_torch(config, tokenizer=tokenizer) is not None
    if "generate" in method.can and tells_rows_apart(between) and not never:
        parts = f"re.split({separator_pattern(between)!r}, text)"
        rows = f"[row for row in map(str.strip, {parts}) if row]"
    found = _scores_in(origin.scores)
    scored = str((origin.scores or {}).get("task"))
    flags = _evaluation_flags(origin.scores or {}, config)
    results = [EvalResult("text2text-generation", scored, scored, key, value) for key, value in found.items()]
    metadata = ModelCardData(
        base_model=origin.base_model or None,
        library_name="peft" if is_adapter else "transformers",
        tags=["text2text-generation", "pipejax", *(["custom_generate", "pipelined-decoding"] if in_torch else [])],
        model_name=name,
        # The hub requires the name of the data set, and has no place for flags.
        eval_results=None if scored in OWN_FILES or flags else results or None,
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
        imports=("import re\n\n" if "re.split" in rows and not in_torch else "")
        + ("import torch\n" if affixes else ""),
        ids=AS_IT_ADDS.format(most=data.max_source)
        if affixes is None
        else AS_IT_LEARNED.format(
            most=data.max_source - len(affixes.prefix) - len(affixes.suffix),
            prefix=[*affixes.prefix],
            suffix=[*affixes.suffix],
        ),
        rows=SIDE_BY_SIDE if in_torch else WHOLE.format(rows=rows, settings=settings),
        scores=_scores_section(origin.scores, found, flags),
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


def _evaluation_flags(given: Mapping[str, object], config: Config) -> list[str]:
    """Returns the flags that `pipejax evaluate` needs, in addition to its default flags, to reproduce scores.

    Args:
      given: the output of `pipejax evaluate --json`.
      config: the config of the run.
    """
    flags, decode = list[str](), config.decode
    if "method" in given and config.method is None and given["method"] != methods.default(config):
        flags.append(f"--method {given['method']}")
    if given.get("limit") is not None:
        flags.append(f"--limit {given['limit']}")
    for key in ("beams", "length_penalty"):
        if given.get(key, value := getattr(decode, key)) != value:
            flags.append(f"--set decode.{key}={given[key]}")
    return flags


def _scores_section(given: Mapping[str, object] | None, scores: Mapping[str, float], flags: Sequence[str]) -> str:
    """Returns the section of README.md with the scores and their command, or "" without scores."""
    if not given or not scores:
        return ""
    told = "\n".join(f"| {key} | {value:.2f} |" for key, value in scores.items())
    command = f"pipejax evaluate --checkpoint checkpoint --task {given['task']} --split {given['split']}"
    command = " ".join([command, *flags])
    return SCORES_TEXT.format(examples=given["examples"], steps=given["steps"], command=command, table=told)
