"""Several adapters on one base: each answer equals the answer of its own checkpoint, opened alone."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from starlette.testclient import TestClient

import pipejax
from pipejax import checkpoint
from pipejax.apps.serving import app
from pipejax.apps.serving.answer import Request
from pipejax.apps.serving.engine import Engine
from pipejax.apps.serving.serve_command import read_adapters
from pipejax.config import Config, DecodeConfig, GridConfig, TrainConfig
from pipejax.convert import to_hf
from pipejax.data.tokenizer import Tokenizer
from pipejax.inference import adapters as inference_adapters
from pipejax.inference.generator import Generator
from pipejax.inference.loading import load
from pipejax.inference.sources import Source
from pipejax.model import lora
from pipejax.system.errors import UserError
from support import oracle, tiny

CONFIG = Config(
    model=tiny.MORE_WORDS,
    grid=GridConfig(delay=2, time_max=12, sub_max=4),
    train=TrainConfig(method="pipelined"),
    decode=DecodeConfig(max_length=20),
)
pytestmark = pytest.mark.usefixtures("compiled_once")


class Places(NamedTuple):
    base: Path
    alone: dict[str, Path]  # checkpoints that decode alone, by the adapter's name; "": the base
    adapters: dict[str, Path]


def adapted(params: Any, rank: int, kept: str = "") -> Any:
    """The parameters with random factors, which change every answer; `kept`: factors only at these paths."""
    rng, flat = np.random.default_rng(rank), flatten_dict(lora.add(params, rank, jax.random.key(rank)), sep="/")
    for path, x in [*flat.items()]:
        if lora.is_factor(path):
            flat[path] = rng.normal(size=x.shape).astype(np.float32) * 0.3
            if kept not in path:
                del flat[path]
    return unflatten_dict(flat, sep="/")


@pytest.fixture(scope="module")
def places(tmp_path_factory: Any) -> Places:
    """A base; a run; a run of another rank and grid without factors in the encoder; a directory of PEFT."""
    root = tmp_path_factory.mktemp("adapters")
    params = oracle.random_params(tiny.MORE_WORDS, np.random.default_rng(4))
    alone = {name: root / (name or "base") for name in ("", "run", "other", "peft")}
    checkpoint.save_params(alone[""], CONFIG, params)
    checkpoint.save_params(alone["run"], CONFIG, adapted(params, 2))
    checkpoint.save_params(alone["other"], tiny.change(CONFIG, grid={"delay": 1}), adapted(params, 3, "decoder"))
    checkpoint.save_params(alone["peft"], CONFIG, adapted(params, 1, "attention"))
    to_hf(alone["peft"], root / "hf", adapter=True, base_model="some/t5")
    return Places(alone[""], alone, {"run": alone["run"], "other": alone["other"], "peft": root / "hf"})


def alone(place: Path) -> Generator:
    """Decodes with merged weights."""
    restored = checkpoint.open_run(place)
    return Generator(restored.config, restored.items["params"], None)


@pytest.fixture(scope="module")
def generator(places: Places) -> Generator:
    return pipejax.load(places.base, adapters=places.adapters)


@pytest.fixture(scope="module")
def sources() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [[*rng.integers(2, 12, rng.choice([3, 9])).tolist(), 1] for _ in range(64)]


def answered(generator: Generator, sources: list[list[int]], wanted: list[str]) -> list[Any]:
    """The records of requests that share batches, each with an adapter."""
    engine = Engine(generator, places=5, queue=100)
    given = enumerate(zip(sources, wanted, strict=True))
    answers = [engine.submit(Request(Source(i, ids), "pipelined", adapter=name)) for i, (ids, name) in given]
    found = [[*answer.events()][-1] for answer in answers]
    engine.close(drain=True, seconds=60)
    return found


@pytest.mark.long
def test_each_of_64_requests_gets_the_answer_of_its_adapter_alone(
    places: Places, generator: Generator, sources: list[list[int]]
) -> None:
    names = [*places.alone]
    wanted = [names[i] for i in np.random.default_rng(1).integers(0, len(names), len(sources))]
    found = answered(generator, sources, wanted)
    told = {name: alone(place).decode(sources) for name, place in places.alone.items()}
    for i, name in enumerate(wanted):
        record = found[i]
        assert isinstance(record, dict) and record["row_ids"] == told[name][i]["row_ids"], (i, name)
        assert name == "" or told[name] != told[""]
    for name in ("run", "peft"):
        assert [x["row_ids"] for x in generator.adapted(name).decode(sources)] == [x["row_ids"] for x in told[name]]
    *_, last = generator.adapted("run").stream_rows(sources[0])
    assert isinstance(last, dict) and last["row_ids"] == told["run"][0]["row_ids"]


@pytest.mark.long
@pytest.mark.parametrize("rounded", ["decode.weights=int8", "decode.weights=bfloat16", "decode.dtype=bfloat16"])
def test_mixed_batch_with_rounded_weights_equals_each_adapter_alone(
    places: Places, sources: list[list[int]], rounded: str
) -> None:
    generator, names = load(places.base, adapters=places.adapters, overrides=[rounded]), [*places.alone]
    wanted = names * (len(sources) // len(names))
    found = answered(generator, sources, wanted)
    told = {name: (generator.adapted(name) if name else generator).decode(sources) for name in names}
    for i, (record, name) in enumerate(zip(found, wanted, strict=True)):
        assert isinstance(record, dict) and record["row_ids"] == told[name][i]["row_ids"], (i, name)


@pytest.mark.slow
def test_the_model_of_a_request_is_the_base_or_an_adapter(
    places: Places, generator: Generator, sources: list[list[int]]
) -> None:
    engine = Engine(generator, places=2, queue=9)
    limits = app.Limits(body=4000, seconds=60.0, answers=4)
    client = TestClient(app.make_app(app.Service(generator, engine, name="base", limits=limits)))
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["base", "run", "other", "peft"]
    assert client.get("/v1/models/other").json()["delays"]["pipelined"] == 1
    prints = set()
    for name in ("base", "other", "peft"):
        reply = client.post("/v1/completions", json={"model": name, "prompt": sources[0]}).json()
        expected = alone(places.alone["" if name == "base" else name]).decode(sources[:1])[0]
        assert reply["model"] == name and reply["choices"][0]["record"]["row_ids"] == expected["row_ids"]
        prints.add(reply["system_fingerprint"])
    assert len(prints) == 3
    reply = client.post("/v1/completions", json={"model": "another", "prompt": sources[0]})
    assert reply.status_code == 404 and "'base' or 'run' or 'other' or 'peft'" in reply.json()["error"]["message"]
    engine.close(drain=False, seconds=60)


@pytest.mark.slow
def test_adapter_of_another_base_is_refused(places: Places, tmp_path: Path) -> None:
    other = oracle.random_params(tiny.MORE_WORDS, np.random.default_rng(5))
    checkpoint.save_params(tmp_path / "another base", CONFIG, adapted(other, 2))
    wide = tiny.change(CONFIG, model={"d_ff": 24})
    assert wide.model is not None
    checkpoint.save_params(tmp_path / "another size", wide, wide.model.init_params(jax.random.key(0)))
    for directory, words in (
        (tmp_path / "another base", r"another base: \S+: found weights that differ"),
        (tmp_path / "another size", "another size: model: found a different architecture"),
        (places.base, "found no LoRA factors; expected a run with train.lora_rank"),
        (tmp_path / "nothing", "no such checkpoint directory"),
    ):
        with pytest.raises(UserError, match=words):
            pipejax.load(places.base, adapters={"a": directory})
    with pytest.raises(UserError, match="adapter: found 'a'; expected none"):
        pipejax.load(places.base).adapted("a")


def test_invalid_names_of_adapters_are_refused() -> None:
    assert read_adapters(["a=runs/a", "b=c=d"], "base") == {"a": "runs/a", "b": "c=d"}
    for given, words in (
        (["a"], "--adapter: found 'a'; expected NAME=DIR"),
        (["=b"], "--adapter: found '=b'; expected NAME=DIR"),
        (["a=b", "a=c"], "--adapter a=c: found the name a twice"),
        (["base=b"], "found the name base twice"),
    ):
        with pytest.raises(UserError, match=words):
            read_adapters(given, "base")


@pytest.mark.parametrize("kind", ["run", "peft", "peft by its main file", "peft by its pieces", "run of more words"])
def test_an_adapter_of_another_tokenizer_is_refused(kind: str, tokenizer_files: Path, tmp_path: Path) -> None:
    """Texts would have other ids than in training; an adapter with the base's tokenizer is accepted."""
    other = tmp_path / "other"
    shutil.copytree(tokenizer_files, other)
    main = json.loads((other / "tokenizer.json").read_text())
    vocab = main["model"]["vocab"]
    one, two = [*vocab][-2:]
    if "more" in kind:  # after the tokens of the base, all of which it has
        vocab["more"] = Tokenizer.load(tokenizer_files).size
    else:
        vocab[one], vocab[two] = vocab[two], vocab[one]
    (other / "tokenizer.json").write_text(json.dumps(main))
    model = dataclasses.replace(tiny.MORE_WORDS, vocab_size=Tokenizer.load(other).size)
    config, params = dataclasses.replace(CONFIG, model=model), oracle.random_params(model, np.random.default_rng(4))
    checkpoint.save_params(tmp_path / "base", config, params, tokenizer_source=tokenizer_files)
    base = checkpoint.open_run(tmp_path / "base")
    for name, files in (("same", tokenizer_files), ("another", other)):
        place = tmp_path / name
        checkpoint.save_params(place, config, adapted(params, 2), tokenizer_source=files)
        if "peft" in kind:
            to_hf(place, tmp_path / f"{name}-hf", adapter=True, base_model="some/t5")
            place = tmp_path / f"{name}-hf"
        if "main" in kind:
            (place / "tokenizer_config.json").unlink()
        if "pieces" in kind:
            (place / "tokenizer_config.json").rename(place / "special_tokens_map.json")
        if name == "same":
            assert inference_adapters.read(place, base, checkpoint.tokenizer_of(base)).factors
        else:
            with pytest.raises(UserError, match=rf"^{place}: found a different tokenizer"):
                inference_adapters.read(place, base, checkpoint.tokenizer_of(base))
