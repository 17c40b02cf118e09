"""Compares two trees of this project: their results, bit by bit, and their commands, settings and public names.

    python -m lab.benchmarks.same record FOLDER      writes decodes, training steps and the surface of this tree
    python -m lab.benchmarks.same compare FOLDER     computes them again, and compares them with the files in FOLDER
    python -m lab.benchmarks.same surface            lists commands, flags, settings, routes, formats and public names

`record` and `compare` take minutes. `decodes.jsonl` has 600 records of tiny random models: methods, delays, drafts,
schemas, adapters, dtypes, batches and streams are drawn from fixed seeds, and a refusal is recorded like an answer.
`training.jsonl` has the losses and gradient norms of 100 steps, and the digests of the final parameters. Compare on the
machine that recorded, since the sums of other processors differ. `compare` exits with 1 if a line differs; it accepts
the files of an interrupted `record`, and compares the lines in them. `--only` selects some of the three files.
"""

import argparse
import dataclasses
import importlib
import inspect
import itertools
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
ROUNDS, SOURCES = 40, 15  # rounds of decodes, and sources in each: their product is the number of records
SHOWN = 5  # most differences that are printed


def main(argv: Sequence[str]) -> int:
    """Runs `record`, `compare` or `surface`."""
    from pipejax.system import cli

    parser = cli.Parser(prog="python -m lab.benchmarks.same", description=__doc__)
    parser.add_argument("task", choices=("record", "compare", "surface"))
    parser.add_argument("folder", nargs="?", metavar="FOLDER", type=Path)
    parser.add_argument("--only", default=",".join(PARTS), metavar="PART,...", help=f"of {', '.join(PARTS)} (all)")
    flags = parser.parse_args(argv)
    if flags.task == "surface" or flags.folder is None:
        print("\n".join(surface()))
        return 0
    same = True
    for name in flags.only.split(","):
        file, lines = flags.folder / f"{name}.jsonl", PARTS[name]()
        if flags.task == "record":
            flags.folder.mkdir(parents=True, exist_ok=True)
            with file.open("w") as out:
                for line in lines:
                    print(line, file=out, flush=True)
            continue
        before = file.read_text().splitlines()
        now = [*lines] if name == "surface" else [*itertools.islice(lines, len(before))]
        if name == "surface":
            changed = [f"- {line}" for line in before if line not in {*now}]
            changed += [f"+ {line}" for line in now if line not in {*before}]
        else:
            changed = [f"- {a}\n+ {b}" for a, b in zip(before, now, strict=False) if a != b]
            changed += [f"{len(before)} lines became {len(now)}"] * (len(before) != len(now))
        same &= not changed
        print(f"{name}: {len(now)} lines, {len(changed)} differences")
        print("\n".join(changed if name == "surface" else changed[:SHOWN]), end="\n" if changed else "")
    return 0 if same else 1


# Decodes.


def decodes() -> Iterator[str]:
    """Yields a line for each answer, with its record or the refusal."""
    import jax

    import pipejax

    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        models = _models(Path(folder))
        for i in range(ROUNDS):
            place, schemas = models[i % len(models) if i % 5 else 0]  # the adapter fits models[0]
            settings = _settings(rng, schemas)
            dtype = ("float32", "bfloat16")[int(rng.random() < 0.25)]
            loaded = {"decode.dtype": dtype, "decode.weights": str(rng.choice(["auto", "auto", "auto", "int8"]))}
            if settings["call"].get("draft") == "model":
                loaded |= {"decode.draft": "model", "decode.draft_checkpoint": str(models[0][0])}
            adapters = {} if i % 5 else {"a": Path(folder, "adapter")}
            sources = _sources(rng, 44)
            said = {"round": i, "model": place.name, **loaded, **settings}
            said["decode.draft_checkpoint"] = bool(loaded.get("decode.draft_checkpoint"))
            found: list[Any]
            try:
                generator = pipejax.load(place, overrides=loaded, adapters=adapters)
                generator = generator.adapted("a") if adapters and rng.random() < 0.7 else generator
                asked = dict(settings["call"])
                asked["method"] = asked.pop("strategy")  # recorded lines have the former name as the key
                if settings["stream"]:
                    asked.pop("batch_size", None)
                    found = [[*generator.stream_rows(source, **asked)] for source in sources]
                else:
                    found = generator.decode(sources, **asked)
            except pipejax.UserError as error:
                found = [str(error).replace(folder, "")] * SOURCES
            said["settings"] = str(said)
            for k, one in enumerate(found):
                yield json.dumps({"round": i, "source": k, "asked": said["settings"], "found": _exact(one)})
            jax.clear_caches()


def _models(folder: Path) -> list[tuple[Path, bool]]:
    """Writes checkpoints of random weights; returns their paths, and whether schemas suit their vocabulary."""
    import jax
    from flax.traverse_util import flatten_dict, unflatten_dict

    from pipejax import checkpoint
    from pipejax.config import Config, DecodeConfig, GridConfig, TrainConfig
    from pipejax.model import lora
    from support import oracle, schemas, tiny

    tokenizer = schemas.save(_made(folder / "tokenizer"))
    untied = dataclasses.replace(schemas.SIZES, tied_head=False, feed_forward="gated-gelu", num_layers=2)
    found = []
    for k, (model, trained) in enumerate(
        [(schemas.SIZES, "pipelined"), (tiny.IN_BLOCKS, "none"), (untied, "sequential")]
    ):
        config = Config(
            model=model,
            grid=GridConfig(delay=k, time_max=20, sub_max=4),
            train=TrainConfig(method=trained),
            decode=DecodeConfig(max_length=20),
        )
        params = oracle.random_params(model, np.random.default_rng(k), eos_scale=1.2)
        has_text = model.vocab_size == schemas.SIZES.vocab_size
        place = folder / f"model{k}"
        checkpoint.save_params(place, config, params, tokenizer_source=tokenizer if has_text else None)
        found.append((place, has_text))
        if k == 0:
            flat, chance = flatten_dict(lora.add(params, 2, jax.random.key(1)), sep="/"), np.random.default_rng(9)
            drawn = {path: chance.normal(size=x.shape).astype(np.float32) * 0.3 for path, x in flat.items()}
            factors = unflatten_dict({p: drawn[p] if lora.is_factor(p) else x for p, x in flat.items()}, sep="/")
            checkpoint.save_params(folder / "adapter", config, factors, tokenizer_source=tokenizer)
    return found


def _made(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def _settings(rng: np.random.Generator, schemas: bool) -> dict[str, Any]:
    """Draws the settings of a call, most of which are compatible."""
    from support import schemas as examples

    strategy = str(rng.choice(["pipelined", "sequential"], p=[0.65, 0.35]))
    call: dict[str, Any] = {"strategy": strategy, "batch_size": int(rng.choice([1, 2, 4, 8]))}
    if strategy == "pipelined":
        call |= {"delay": int(rng.integers(1, 4)), "stop": str(rng.choice(["empty_row", "literal"]))}
        call |= {"sub_max": int(rng.choice([2, 4])), "time_max": int(rng.choice([12, 20]))}
    elif rng.random() < 0.3:
        call |= {"beams": int(rng.choice([2, 3])), "length_penalty": 0.7}
    if rng.random() < 0.4:
        call |= {"temperature": 0.9, "seed": int(rng.integers(99)), "top_k": int(rng.choice([0, 5])), "top_p": 0.95}
        call |= {"samples": 2} if rng.random() < 0.3 else {}
    call |= {"scores": True} if rng.random() < 0.4 else {}
    call |= {"unique_rows": True} if rng.random() < 0.2 else {}
    call |= {"limit": "source"} if rng.random() < 0.15 else {}
    stream = bool(rng.random() < 0.2)
    if "beams" not in call and not stream and rng.random() < 0.35:
        call |= {"draft": str(rng.choice(["source", "jacobi", "model"])), "draft_tokens": 3, "trace": True}
    elif schemas and rng.random() < 0.6 and not stream:
        call |= {"schema": examples.many(40)[int(rng.integers(40))], "delay": 0, "sub_max": 4, "time_max": 40}
        call["strategy"] = "pipelined"
        for key in ("stop", "limit", "beams", "length_penalty"):
            call.pop(key, None)
    return {"stream": stream, "call": call}


def _sources(rng: np.random.Generator, vocabulary: int) -> list[list[int]]:
    """Draws the token ids of sources that have one padded length."""
    return [[*map(int, rng.integers(3, vocabulary, int(rng.integers(1, 15)))), 1] for _ in range(SOURCES)]


def _exact(value: Any) -> Any:
    """Plain values, with floats as texts of all their bits."""
    if isinstance(value, dict):
        return {str(key): _exact(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_exact(inner) for inner in value]
    if isinstance(value, float | np.floating):
        return float(value).hex()
    return value if isinstance(value, str | int | bool | None) else str(value)


# Training.

RUNS: dict[str, dict[str, Any]] = {
    "pipelined": {"grid.delay": 2, "train.dropout": 0.1},
    "sequential": {"train.method": "sequential", "train.schedule": "cosine", "train.weight_decay": 0.01},
    "parts": {"train.accumulate": 2, "train.remat": "layers", "train.optimizer": "adafactor", "grid.delay": 3},
    "lora": {"train.lora_rank": 3, "train.pack": 2},
    "bfloat16": {"train.dtype": "bfloat16", "train.freeze": "encoder", "train.schedule": "linear"},
}


def training() -> Iterator[str]:
    """Yields a line for each of 5 x 20 steps, and a line with the digest of the parameters of each checkpoint."""
    import pipejax
    from pipejax import checkpoint
    from pipejax.checkpoint.fingerprint import digest
    from support import tiny

    quick = {"train.steps": 20, "train.evaluate_every": 1000, "train.checkpoint_every": 10}
    with tempfile.TemporaryDirectory() as folder:
        for name, settings in RUNS.items():
            begins = {"train.init_from": str(Path(folder) / "pipelined")} if "train.lora_rank" in settings else {}
            run = pipejax.fit(tiny.RUN_ON_ONE, Path(folder) / name, overrides={**quick, **settings, **begins})
            for line in tiny.untimed(tiny.metrics(run)):
                if line["event"] in ("train", "evaluate", "eval"):
                    yield json.dumps({"run": name, **_exact(line)})
            for step in (10, 20):
                restored = checkpoint.Store(run / "checkpoints").describe(step)
                prints = {item: digest(arrays) for item, arrays in restored.arrays.items()}
                yield json.dumps({"run": name, "step": step, "digests": prints})


# The surface.


def surface() -> list[str]:
    """The sorted lines of the surface: each has a name that a user may write or call."""
    return sorted({*_flags(), *_keys(), *_served(), *_names(), *_files()})


class _Seen(Exception):
    """Raised with the parser of a command, when the command would parse its flags."""


def _flags() -> Iterator[str]:
    from pipejax.registry import COMMANDS
    from pipejax.system import cli

    def seen(parser: argparse.ArgumentParser, *_: object) -> None:
        raise _Seen(parser)

    parse, cli.Parser.parse_args = cli.Parser.parse_args, seen  # type: ignore[method-assign, assignment]
    try:
        for command, (_, module) in COMMANDS.items():
            try:
                importlib.import_module(module).main([])
            except _Seen as found:
                yield from _flags_of(f"command {command}", found.args[0])
    finally:
        cli.Parser.parse_args = parse  # type: ignore[method-assign]


def _flags_of(command: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield command
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from _flags_of(f"{command} {name}", inner)
            continue
        flag = "/".join(action.option_strings) or str(action.metavar or action.dest)
        choices = f" of {','.join(map(str, action.choices))}" if action.choices else ""
        default = "" if action.default in (None, argparse.SUPPRESS) else f" = {action.default}"
        yield f"{command} {flag}{choices}{default} nargs={action.nargs} required={action.required}"


def _keys() -> Iterator[str]:
    from pipejax.config import Config, T5Config, flat
    from pipejax.inference.settings import NAMES

    for key, value in flat(Config()).items():
        yield f"setting {key} = {value!r}"
    for field in dataclasses.fields(T5Config):
        yield f"setting model.{field.name}"
    for section in dataclasses.fields(Config):
        if dataclasses.is_dataclass(value := getattr(Config(), section.name)):
            for field in dataclasses.fields(value):
                yield f"setting {section.name}.{field.name}: {dict(field.metadata)}"
    yield from (f"setting of a call: {name}" for name in NAMES)


def _served() -> Iterator[str]:
    from pipejax.apps.serving import app

    text = Path(app.__file__).read_text()
    yield from (f"route {path}" for path in re.findall(r'"(/[a-z0-9/{}_:]*)"', text))


def _names() -> Iterator[str]:
    import pipejax
    from pipejax import data, metrics

    for name in pipejax.__all__:
        yield from _signatures(f"pipejax.{name}", getattr(pipejax, name))
    for room in ("config", "convert", "checkpoint", "methods", "decoding", "metrics", "model.backbone", "testing"):
        module = importlib.import_module(f"pipejax.{room}")
        public = getattr(module, "__all__", None) or [
            name
            for name, x in vars(module).items()
            if getattr(x, "__module__", "") == module.__name__ and name[0] != "_"
        ]
        yield from (f"name pipejax.{room}.{name}" for name in public)
    yield from (f"task {name}" for name in data.TASKS)
    yield from (f"metric {name}" for name in metrics.HEADLINES)


def _signatures(name: str, found: object) -> Iterator[str]:
    if inspect.isclass(found):
        yield f"name {name}"
        for inner, method in inspect.getmembers(found):
            if not inner.startswith("_") and not (inspect.isbuiltin(method) or inspect.ismethoddescriptor(method)):
                yield from _signatures(f"{name}.{inner}", method)
    elif inspect.isroutine(found):
        given = ", ".join(map(str, inspect.signature(found).parameters.values()))
        yield re.sub(" at 0x[0-9a-f]+", "", f"name {name}({given})")
    else:
        yield f"name {name}"


def _files() -> Iterator[str]:
    """Yields the endings of files that the package names, and the requirements and scripts of its distribution."""
    import tomllib

    for path in (ROOT / "pipejax").rglob("*.py"):
        yield from (f"ending {ending}" for ending in re.findall(r'"(\.[a-z0-9]{1,12})"', path.read_text()))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    yield from (f"script {name}" for name in project["scripts"])
    yield from (f"extra {name}: {', '.join(lines)}" for name, lines in project["optional-dependencies"].items())


PARTS = {"surface": surface, "training": training, "decodes": decodes}

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Compilation takes more time than computation.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    from pipejax.system import cli

    cli.run(main)
