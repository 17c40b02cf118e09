"""Sources get the ids of transformers' tokenizers, cut and uncut, in every command that encodes sources."""

import dataclasses
import functools
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import processors

import pipejax
from pipejax import checkpoint
from pipejax import config as config_lib
from pipejax.apps.export.programs_as_files import export
from pipejax.apps.statistics.split_statistics import measure_split
from pipejax.config import Config, DataConfig, DecodeConfig, GridConfig, TrainConfig
from pipejax.convert import description, huggingface
from pipejax.data.encoding import encode_example, encode_source
from pipejax.data.examples import Example
from pipejax.data.tokenizer import Affixes, Tokenizer, source_affixes
from pipejax.decoding import Allowed
from pipejax.inference import decoding_options
from pipejax.inference.generator import Generator
from pipejax.inference.report import Report
from pipejax.inference.sources import Source
from pipejax.offline.resume import first_difference, settings_of
from pipejax.training import start
from pipejax.training.loop import fit
from support import oracle, tiny
from support.manifests import seal
from support.scripted_engine import ScriptedEngine
from support.served import connect, service
from support.tokenizer_kinds import KINDS, WORDS, rename, save, unigram

pytestmark = pytest.mark.usefixtures("compiled_once")

MODEL = dataclasses.replace(tiny.FEW_WORDS, vocab_size=400)
PARAMS = oracle.random_params(MODEL, np.random.default_rng(3), scale=0.8)
TEXTS = [
    *("the fox", "the foxes jump over a lazy dog and the fox", "x", "é漢 the 🙂 fox", "", " \n "),
    *("the </s> fox", "the fox</s>", "</s>", "<s> the <pad>", "[CLS] the fox [SEP]", "the [SEP]", "<bos>the<eos>"),
    *("<2en> the <unk> [UNK] <mask>", "<|endoftext|>", "a </s></s>", "</s> the </s> fox jumps"),
]
ADDED = {"roberta": 2, "bert": 2, "gemma": 1, "t5": 1, "byt5": 1, "gpt2": 0, "words": 3}  # special ids of a source


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory of each kind of tokenizer."""
    root = tmp_path_factory.mktemp("kinds")
    return {name: make(root / str(i)) for i, (name, make) in enumerate(KINDS.items())}


in_transformers = functools.cache(transformers.AutoTokenizer.from_pretrained)


def transformers_ids(directory: Path, text: str, most: int | None) -> list[int]:
    theirs = in_transformers(directory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ByT5's tokenizer warns about texts that end with an eos
        found: list[int] = theirs(text, truncation=most is not None, max_length=most, verbose=False).input_ids
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_source_ids_equal_transformers(kind: str, made: dict[str, Path]) -> None:
    """Special ids are kept if a text is cut, and special tokens in a text count as text."""
    tokenizer, added = Tokenizer.load(made[kind]), ADDED[kind.partition(" ")[0]]
    for text in TEXTS:
        for most in (None, *range(max(added, 2), 9), 30):
            data = DataConfig(max_source=most or 2048)
            expected = transformers_ids(made[kind], text, most)
            found = encode_source(text, data, tokenizer, MODEL)
            assert found.ids == (expected or [MODEL.eos_token_id]), (text, most)
            whole = encode_source(text, DataConfig(), tokenizer, MODEL).ids
            assert found.left_out == len(whole) - len(found.ids)
            assert found.left_out == 0 or most


@pytest.mark.parametrize("kind", ["roberta", "bert", "gemma", "byt5", "gpt2", "words"])
def test_all_callers_encode_sources_alike(kind: str, made: dict[str, Path]) -> None:
    """The callers are training, decoding, a server, and the statistics of data."""
    text, most = "the foxes jump over a dog", 7
    config = Config(model=MODEL, data=DataConfig(max_source=most), train=TrainConfig(method="pipelined"))
    generator = Generator(config, PARAMS, Tokenizer.load(made[kind]))
    expected = transformers_ids(made[kind], text, most)
    assert len(expected) == most
    example, report = Example("0", text, ("the",)), Report()
    assert generator.tokenizer is not None
    encoded = encode_example(example, generator.tokenizer, config, MODEL)
    assert encoded.source.tolist() == expected and encoded.source_was_cut
    assert list(generator.ids_of(Source("0", text), report)) == expected and report.cut_sources == 1
    engine = ScriptedEngine(generator)
    body = {"prompt": text, "truncate": True}
    usage = connect(service(engine)).post("/v1/completions", json=body).json()["usage"]
    whole = len(transformers_ids(made[kind], text, None))
    assert list(engine.requests[0].source.content) == expected
    assert (usage["prompt_tokens"], usage["cut_tokens"]) == (most, whole - most)
    refused = connect(service(engine)).post("/v1/completions", json={"prompt": text}).json()["error"]["message"]
    assert refused.startswith(f"prompt: found {whole} tokens; expected at most {most}")
    found = measure_split([example], generator.tokenizer, config.data, GridConfig())
    assert found["tokens"]["source"]["most"] == whole and found["cut_percent"]["max_source"] == 100


@pytest.mark.parametrize(
    "affixes, ids, most, expected",
    [
        (Affixes(), [5, 6, 7, 8], 3, [5, 6, 7]),
        (Affixes((2,)), [2, 5, 6, 7], 3, [2, 5, 6]),
        (Affixes((), (1,)), [5, 6, 7, 1], 3, [5, 6, 1]),
        (Affixes((), (1,)), [5, 6, 7, 8], 3, [5, 6, 7]),  # token ids without an eos
        (Affixes((0,), (2,)), [0, 5, 6, 7, 2], 2, [0, 2]),
        (Affixes((3,), (1, 3)), [3, 5, 6, 7, 1, 3], 4, [3, 5, 1, 3]),
        (Affixes((3,), (1, 4)), [3, 5, 6, 7, 1, 4], 2, [1, 4]),
        (Affixes((), (1,)), [5, 1, 6, 7, 1], 3, [5, 1, 1]),
        (Affixes((), (1,)), [5, 1], 3, [5, 1]),
    ],
)
def test_ids_of_source_are_cut_to_the_limit(affixes: Affixes, ids: list[int], most: int, expected: list[int]) -> None:
    assert affixes.cut(ids, most) == expected


def test_token_ids_are_only_truncated(made: dict[str, Path]) -> None:
    tokenizer, data = Tokenizer.load(made["gemma"]), DataConfig(max_source=3)
    assert encode_source([2, 9, 9, 9, 1], data, tokenizer, MODEL) == ([2, 9, 9], 2)
    assert encode_source([9, 9, 9, 9], data, None, MODEL) == ([9, 9, 9], 1)
    assert encode_source(np.asarray([9, 9, 9, 1]), data, None, MODEL) == ([9, 9, 1], 1)


@pytest.mark.parametrize("settings", [{"add_eos_token": True}, {"add_bos_token": True, "add_eos_token": False}])
@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "T5Tokenizer"])
def test_settings_that_replace_the_template_of_files(kind: str, settings: dict[str, bool], tmp_path: Path) -> None:
    inner = unigram(["<pad>", "</s>", "<unk>", "<s>", *WORDS], 2)
    inner.post_processor = processors.TemplateProcessing(single="$A </s> </s>", special_tokens=[("</s>", 1)])
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    directory = rename(save(tmp_path / "it", inner, **named), kind, extra_ids=0, **settings)
    for text in ("the fox", ""):
        expected = transformers_ids(directory, text, None)
        found = encode_source(text, DataConfig(), Tokenizer.load(directory), MODEL).ids
        assert found == (expected or [MODEL.eos_token_id])


def test_template_is_read_without_unknown_token(tmp_path: Path) -> None:
    """The vocabulary has letters, digits and an id for unknown characters."""
    inner = unigram(["<s>", "</s>", "漢"], 0)
    inner.model = type(inner.model)([("<s>", 0.0), ("</s>", 0.0), ("漢", -1.0)], None)
    inner.pre_tokenizer = None
    around: Any = [("<s>", 0), ("</s>", 1)]
    inner.post_processor = processors.TemplateProcessing(single="<s> <s> $A </s>", special_tokens=around)
    tokenizer = Tokenizer.load(save(tmp_path / "it", inner, bos_token="<s>", eos_token="</s>"))
    assert tokenizer.affixes == Affixes((0, 0), (1,))


# Answers of a model in transformers.


def written(directory: Path, tokenizer: Path, model: Any = MODEL, **data: Any) -> tuple[Path, Generator]:
    """A pipelined run, and the directory that `to-hf` writes for it."""
    config = Config(
        model=model,
        data=DataConfig(task="none", **data),
        grid=GridConfig(delay=1, time_max=9, sub_max=3),
        train=TrainConfig(method="pipelined"),
    )
    checkpoint.save_params(directory / "run", config, PARAMS, tokenizer_source=tokenizer)
    huggingface.to_hf(directory / "run", directory / "hf")
    return directory / "hf", pipejax.load(directory / "run")


@pytest.mark.parametrize(
    "kind, eos",
    [("bert", 1), *(pytest.param(kind, eos, marks=pytest.mark.slow) for kind, eos in (("roberta", 2), ("gpt2", 0)))],
)
def test_answers_equal_transformers(kind: str, eos: int, made: dict[str, Path], tmp_path: Path) -> None:
    """`generate` writes one row, `custom_generate` several; a conversion of the written files gives them, too."""
    model = dataclasses.replace(MODEL, eos_token_id=eos)
    directory, ours = written(tmp_path, made[kind], model, max_source=8)
    huggingface.from_hf(directory, tmp_path / "again")
    again = pipejax.load(tmp_path / "again")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(directory)
    texts, card = ["the fox", "the foxes jump over", "x"], (directory / description.CARD).read_text()
    rows, lines = ours.decode(texts), ours.decode(texts, method="sequential", max_length=7)
    assert again.decode(texts) == rows
    for text, row, line in zip(texts, rows, lines, strict=True):
        (encode,) = [line for line in card.splitlines() if line.startswith("ids = ")]
        exec(encode, names := {"tokenizer": tokenizer, "source": text})
        ids = names["ids"]
        assert ids["input_ids"][0].tolist() == list(ours.ids_of(Source("", text)))
        how = {"custom_generate": str(directory), "trust_remote_code": True, "return_dict_in_generate": True}
        assert theirs.generate(**ids, **how).rows[0] == row["row_ids"]
        found = theirs.generate(**ids, max_new_tokens=7, do_sample=False)[0, 1:].tolist()
        assert [token for token in found if token not in (eos, 0)] == [i for i in line["row_ids"][0] if i]
    assert len({str(row["row_ids"]) for row in rows}) > 1


def test_limit_to_source_excludes_special_ids(made: dict[str, Path]) -> None:
    model = dataclasses.replace(MODEL, eos_token_id=2)
    config = Config(model=model, grid=GridConfig(time_max=6, sub_max=2), decode=DecodeConfig(limit="source"))
    ours = Generator(config, PARAMS, Tokenizer.load(made["roberta"]))
    source = Source("", "the fox")
    ids = ours.ids_of(source)
    method, strategy = ours.method(), ours.make_strategy()
    options = decoding_options.of_batch([source], [ids], method, strategy, config=config, tokenizer=ours.tokenizer)
    (rule,) = options.rules
    assert isinstance(rule, Allowed) and ids[0] == 1
    assert [*np.flatnonzero(rule.tokens[0])] == sorted(ids[1:])


@pytest.mark.parametrize("by_transformers", [False, True])
def test_left_truncation_of_tokenizer_is_reported(
    by_transformers: bool, made: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the conversion of such a tokenizer reports it."""
    kind = "roberta" if by_transformers else "roberta as it is"
    directory = shutil.copytree(made[kind], tmp_path / "tokenizer")
    model = dataclasses.replace(MODEL, eos_token_id=2)
    for name, side in (("one", "right"), ("two", "left")):
        content = json.loads((directory / "tokenizer_config.json").read_text())
        rename(directory, content["tokenizer_class"], truncation_side=side)
        huggingface.write_hf(model, PARAMS, tmp_path / name / "hf", directory)
        huggingface.from_hf(tmp_path / name / "hf", tmp_path / name / "run")
        assert ("truncation_side: found left; ignored" in capsys.readouterr().err) == (side == "left")


def test_an_export_names_the_ids_around_a_source(made: dict[str, Path], tmp_path: Path) -> None:
    model = dataclasses.replace(MODEL, eos_token_id=2)
    _, ours = written(tmp_path, made["roberta"], model)
    export(tmp_path / "run", tmp_path / "out", platforms=["cpu"], batch=1, length=8)
    facts = json.loads((tmp_path / "out" / "export.json").read_text())
    assert facts["source"] == {"prefix": [1], "suffix": [2]} and facts["eos"] == 2
    assert list(ours.ids_of(Source("", "x")))[:1] == [1]


# Runs and conversions of former versions, which had no `data.special_tokens` and added only an eos.


def as_of_former_version(run: Path) -> Path:
    """The run without the key, in its manifests and its config.json."""
    for file in (*run.glob("*/*/manifest/metadata"), run / "config.json"):
        content = json.loads(file.read_text())
        data = content["config"]["data"] if "seal" in content else content["data"]
        del data["special_tokens"]
        file.write_text(json.dumps(seal(content) if "seal" in content else content))
    return run


def run_of(directory: Path, tokenizer: Path, objective: str, **data: Any) -> Path:
    eos = Tokenizer.load(tokenizer).eos
    model = dataclasses.replace(MODEL, eos_token_id=1 if eos is None else eos)
    config = Config(model=model, data=DataConfig(task="none", **data), train=TrainConfig(method=objective))
    checkpoint.save_params(directory, config, PARAMS, tokenizer_source=tokenizer)
    return directory


@pytest.mark.parametrize("kind, eos", [("roberta", 2), ("bert", 1), ("gpt2", 0)])
def test_a_trained_run_keeps_its_source_ids_and_a_conversion_is_corrected(
    kind: str, eos: int, made: dict[str, Path], tmp_path: Path, said: list[str]
) -> None:
    text = "the fox"
    trained = pipejax.load(as_of_former_version(run_of(tmp_path / "run", made[kind], "pipelined")))
    own = Tokenizer.load(made[kind]).encode(text)
    assert list(trained.ids_of(Source("", text))) == [*own, eos]
    [line] = said
    assert line.startswith(f"warning: {tmp_path / 'run'}: sources are encoded with [] before and [{eos}] after")
    said.clear()
    converted = pipejax.load(as_of_former_version(run_of(tmp_path / "converted", made[kind], "none")))
    assert list(converted.ids_of(Source("", text))) == transformers_ids(made[kind], text, None)
    [line] = said
    assert f"as in transformers; an earlier version of pipejax added [] before and [{eos}] after the text" in line
    said.clear()
    new = [pipejax.load(run_of(tmp_path / name, made[kind], name)) for name in ("pipelined", "none")]
    assert [list(x.ids_of(Source("", text))) for x in new] == [transformers_ids(made[kind], text, None)] * 2
    assert not said


@pytest.mark.parametrize("kind", ["t5", "byt5", "gemma"])
@pytest.mark.parametrize("objective", ["pipelined", "none"])
def test_unaffected_earlier_runs_are_not_reported(
    kind: str, objective: str, made: dict[str, Path], tmp_path: Path, said: list[str]
) -> None:
    """The former version added the same ids as transformers. Gemma's bos begins rows, too."""
    run = run_of(tmp_path / "run", made[kind], objective)
    config = checkpoint.open_run(run).config
    model: Any = config.model
    if kind == "gemma":
        model = dataclasses.replace(model, decoder_start_token_id=2)
        checkpoint.save_params(
            tmp_path / "other", dataclasses.replace(config, model=model), PARAMS, tokenizer_source=made[kind]
        )
        run = tmp_path / "other"
    opened = pipejax.load(as_of_former_version(run))
    for text in ("the fox", "the </s>"):
        assert list(opened.ids_of(Source("", text))) == transformers_ids(made[kind], text, None)
    assert not said


def test_fine_tuning_keeps_source_ids_of_initial_weights(
    made: dict[str, Path], tmp_path: Path, said: list[str]
) -> None:
    """This holds for the run and for a run that starts from it; another rule is refused on resume."""
    former = as_of_former_version(run_of(tmp_path / "run", made["roberta"], "pipelined"))
    saved = checkpoint.open_run(former).config
    wanted = dataclasses.replace(saved, data=dataclasses.replace(saved.data, special_tokens="auto"))
    assert start.as_begun(wanted, saved, former).data.special_tokens == "eos"
    other = dataclasses.replace(saved, data=dataclasses.replace(saved.data, special_tokens="template"))
    with pytest.raises(Exception, match=r"data\.special_tokens: 'eos' -> 'template'; expected no change on resume"):
        start.as_begun(other, saved, former)

    def begun(init: Path, **data: Any) -> str:
        config = Config(data=DataConfig(task="jsonl", **data), train=TrainConfig(init_from=str(init)))
        return start._prepare_trainer(config)[0].config.data.special_tokens

    converted = run_of(tmp_path / "converted", made["roberta"], "none")
    assert begun(former) == "eos" and begun(former, special_tokens="template") == "template"
    assert begun(converted) == "template" and begun(converted, special_tokens="eos") == "eos"
    fresh = Config(model=MODEL, data=DataConfig(task="jsonl", tokenizer=str(made["roberta"])))
    fresh = dataclasses.replace(fresh, model=dataclasses.replace(MODEL, eos_token_id=2))
    assert start._prepare_trainer(fresh)[0].config.data.special_tokens == "template"


@pytest.mark.slow
def test_resumed_run_keeps_source_encoding(made: dict[str, Path], tmp_path: Path) -> None:
    """Runs of a former version keep it too, and their new steps name the rule."""
    lines = "".join(json.dumps({"source": f"the fox {i}", "targets": ["x", "the"]}) + "\n" for i in range(8))
    (tmp_path / "train.jsonl").write_text(lines)
    own = {"task": "jsonl", "train": str(tmp_path / "train.jsonl"), "tokenizer": str(made["roberta"])}
    model = dataclasses.replace(tiny.MODEL, vocab_size=400, eos_token_id=2)
    config = tiny.change(dataclasses.replace(tiny.RUN_ON_ONE, model=model), data=own, train={"evaluate_every": 9})
    for name, rule, expected in (("new", "template", [1]), ("former", "eos", [])):
        for steps in (3, 6):
            fit(tiny.change(config, train={"steps": steps}), tmp_path / name)
            if steps == 3 and name == "former":
                as_of_former_version(tmp_path / name)
        assert checkpoint.open_run(tmp_path / name).config.data.special_tokens == rule
        ids = pipejax.load(tmp_path / name).ids_of(Source("", "the fox"))
        assert [*ids] == [*expected, *Tokenizer.load(made["roberta"]).encode("the fox"), 2]


def test_to_hf_directory_keeps_source_ids_of_training(
    made: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its README.md encodes like the run, and pipejax.json restores the setting."""
    run = as_of_former_version(run_of(tmp_path / "run", made["roberta"], "sequential", max_source=6))
    huggingface.to_hf(run, tmp_path / "hf")
    line = "transformers adds [1] before and [2] after the text, the run was trained with [] before and [2] after"
    assert line in capsys.readouterr().err
    huggingface.from_hf(tmp_path / "hf", tmp_path / "again")
    text = "the foxes jump over"
    expected = list(pipejax.load(run).ids_of(Source("", text)))
    assert list(pipejax.load(tmp_path / "again").ids_of(Source("", text))) == expected and len(expected) == 6
    card = (tmp_path / "hf" / description.CARD).read_text()
    lines = [line for line in card.splitlines() if line.startswith(("text_ids =", "ids ="))]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    found: dict[str, Any] = {"tokenizer": tokenizer, "torch": torch, "source": text}
    exec("\n".join(lines), found)
    assert found["ids"]["input_ids"].tolist() == [expected] and "\nimport torch\n" in card
    file = tmp_path / "hf" / description.FILE  # as a former version wrote it
    content = json.loads(file.read_text())
    del content["config"]["data"]["special_tokens"]
    file.write_text(json.dumps(content))
    huggingface.from_hf(tmp_path / "hf", tmp_path / "former")
    assert list(pipejax.load(tmp_path / "former").ids_of(Source("", text))) == expected


def test_unfinished_output_of_earlier_version_is_not_resumed(made: dict[str, Path]) -> None:
    """The refusal applies only if its sources had other ids."""
    for kind, differs in (("roberta", True), ("bert", True), ("t5", False), ("byt5", False)):
        tokenizer = Tokenizer.load(made[kind])
        model = dataclasses.replace(MODEL, eos_token_id=tokenizer.eos or 1)
        settings = settings_of(Generator(Config(model=model), PARAMS, tokenizer), "pipelined", [])
        former = {key: x for key, x in settings.items() if "special" not in key}
        assert bool(first_difference(settings, former)) == differs
        assert not first_difference(settings, settings)


def test_config_of_no_run_has_default_special_tokens() -> None:
    assert config_lib.from_json("{}", where="x").data.special_tokens == "auto"
    assert config_lib.from_saved({}, where="x").data.special_tokens == "eos"
    assert config_lib.from_saved({"train": {"objective": "none"}}, where="x").data.special_tokens == "auto"
    assert source_affixes(None, MODEL, "template") == Affixes(suffix=(MODEL.eos_token_id,))
