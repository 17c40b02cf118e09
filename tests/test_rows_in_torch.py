"""Rows in transformers' `generate`: the file that `convert to-hf` writes, against Algorithm 1 in plain lists."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from pipejax.config import Config, DataConfig, GridConfig, T5Config
from pipejax.convert import description, huggingface
from support import oracle
from support.in_transformers import config_facts, written_module
from support.tiny import FEW_WORDS, MODEL

GATED = dataclasses.replace(FEW_WORDS, feed_forward="gated-gelu", tied_head=False, scale_head=False)
# backbone and arguments of `generate`; three names of rows are drawn for cases with names
SETTINGS: list[tuple[T5Config, dict[str, Any]]] = [
    (FEW_WORDS, {"delay": 1, "time_max": 12, "sub_max": 5}),
    (FEW_WORDS, {"delay": 2, "time_max": 9, "sub_max": 4, "literal": True}),
    (FEW_WORDS, {"delay": 3, "time_max": 14, "sub_max": 4}),
    (FEW_WORDS, {"delay": 1, "time_max": 14, "sub_max": 9, "unique": True}),
    (FEW_WORDS, {"delay": 0, "time_max": 9, "sub_max": 3, "row_names": 3}),
    (FEW_WORDS, {"delay": 2, "time_max": 16, "sub_max": 8, "row_names": 3}),
    (GATED, {"delay": 1, "time_max": 14, "sub_max": 8}),
    (dataclasses.replace(FEW_WORDS, other_eos_token_ids=(5, 7)), {"delay": 2, "time_max": 16, "sub_max": 6}),
]
# A process that has neither pipejax nor JAX.
CHILD = """
import json, sys
sys.path[:] = [path for path in sys.path if path != sys.argv[2]]
sys.modules["jax"] = sys.modules["pipejax"] = None
import torch
from transformers import T5ForConditionalGeneration

torch.set_num_threads(1)
found = []
for case in json.load(open("cases.json")):
    model = T5ForConditionalGeneration.from_pretrained(case["directory"])
    length = max(map(len, case["sources"]))
    ids = torch.tensor([source + [0] * (length - len(source)) for source in case["sources"]])
    mask = torch.tensor([[1] * len(source) + [0] * (length - len(source)) for source in case["sources"]])
    given = dict(input_ids=ids, attention_mask=mask, custom_generate=".", trust_remote_code=True, **case["settings"])
    answer = model.generate(**given, return_dict_in_generate=True)
    assert (model.generate(**given) == answer.sequences).all()
    found.append([answer.sequences.tolist(), answer.rows, answer.steps, answer.truncated])
print(json.dumps(found))
"""


def transformers_writes(directory: Path, cases: list[dict[str, Any]]) -> list[Any]:
    """The child's answers to each case: sequences, rows, steps and bounds of a batch."""
    (directory / "custom_generate").mkdir()
    (directory / description.GENERATE).write_text(description.custom_generate(Config(model=FEW_WORDS), None) or "")
    (directory / "cases.json").write_text(json.dumps(cases))
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", CHILD, "", root], cwd=directory, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("models", [pytest.param(1, marks=pytest.mark.slow), pytest.param(43, marks=pytest.mark.long)])
def test_rows_equal_algorithm_1(models: int, tmp_path: Path) -> None:
    """In batches without pipejax and JAX, rows, steps, bounds and the joined sequence of tokens are equal."""
    rng, cases, expected = np.random.default_rng(0), [], []
    for number in range(models * len(SETTINGS)):
        model, settings = SETTINGS[number % len(SETTINGS)]
        params = oracle.random_params(model, rng, scale=0.5 + rng.random(), eos_scale=1 + rng.random())
        directory = tmp_path / str(number)
        huggingface.write_hf(model, params, directory, None)
        sources = [[*rng.integers(2, 9, rng.integers(1, 9)).tolist(), 1] for _ in range(3)]
        names = [rng.integers(2, 9, rng.integers(1, 3)).tolist() for _ in range(settings.get("row_names", 0))]
        given = settings | {"row_names": names, "separator": [2, 3]}
        cases.append({"directory": str(directory), "sources": sources, "settings": given})
        beyond = [[1]] if names and settings["delay"] else []  # a row without a name is the empty row
        stop = "literal" if settings.get("literal") else "empty_row"
        bounds = {key: settings[key] for key in ("delay", "time_max", "sub_max")}
        expected += [
            oracle.algorithm1(
                oracle.grid_next_tokens(params, model, oracle.encode(params, model, source), settings["delay"]),
                stop=stop,
                prefixes=names + beyond,
                eos=model.end_token_ids,
                unique=settings.get("unique", False),
                **bounds,
            )
            for source in sources
        ]
    batches = transformers_writes(tmp_path, cases)
    found = [one for batch in batches for one in zip(*batch, strict=True)]
    assert len(found) == len(expected)
    for (sequence, rows, steps, truncated), answer in zip(found, expected, strict=True):
        assert (rows, steps, truncated) == (answer.rows, answer.steps, answer.truncated)
        joined = [token for i, row in enumerate(rows) for token in [*([2, 3] if i else []), *row]]
        assert sequence[: len(joined) + 2] == [0, *joined, 1] and not any(sequence[len(joined) + 2 :])
    assert any(len(answer.rows) > 2 for answer in expected) and any(answer.truncated for answer in expected)


# In this process, with a model of few words.


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The module that `to-hf` writes, with a model in the same folder; its rows take at most 6 steps."""
    return generate_of(FEW_WORDS, tmp_path_factory.mktemp("written"))


def generate_of(sizes: T5Config, place: Path) -> Any:
    """`generate` of the module that `to-hf` writes, for a random model."""
    config = Config(model=sizes, grid=GridConfig(delay=1, time_max=6, sub_max=3))
    module, facts = written_module(config, place), config_facts(sizes)
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**facts)).eval()
    model.generation_config = transformers.GenerationConfig(
        **{key: facts[key] for key in ("pad_token_id", "eos_token_id", "decoder_start_token_id")}, max_new_tokens=6
    )
    return lambda **given: module.generate(model, **({"input_ids": IDS} | given))


IDS = torch.tensor([[3, 4, 1]])
NO_CONFIG = transformers.GenerationConfig
UNKNOWN = [  # unsupported arguments
    {"do_sample": True},
    {"num_beams": 4},
    {"num_beams": True},
    {"max_new_tokens": 1},
    {"max_length": 20},
    {"min_length": 1},
    {"num_return_sequences": 2},
    {"repetition_penalty": 1.2},
    {"no_repeat_ngram_size": 2},
    {"length_penalty": 0.5},
    {"temperature": 0.7},
    {"top_k": 5},
    {"bad_words_ids": [[3]]},
    {"suppress_tokens": [3]},
    {"eos_token_id": 3},
    {"eos_token_id": [1, 3]},
    {"eos_token_id": True},
    {"decoder_start_token_id": 2},
    {"decoder_input_ids": torch.tensor([[0, 3]])},
    {"decoder_input_ids": torch.tensor([[3]])},
    {"decoder_attention_mask": torch.tensor([[1, 1]])},
    {"synced_gpus": True},
    {"assistant_model": torch.nn.Linear(1, 1)},
    {"inputs_embeds": torch.zeros(1, 1, 16)},
    {"logits_processor": [len]},
    {"output_scores": True},
    {"output_attentions": True},
    {"generation_config": NO_CONFIG(num_beams=2)},
    {"generation_config": NO_CONFIG(do_sample=True)},
    {"generation_config": NO_CONFIG(eos_token_id=5)},
    {"generation_config": NO_CONFIG(dellay=3)},
    {"dellay": 3},
    {"DELAY": 3},
    {"rows": 3},
]
WRONG = [  # settings
    {"delay": True},
    {"delay": -1},
    {"delay": 1.0},
    {"delay": "2"},
    {"time_max": 0},
    {"sub_max": 0},
    {"literal": 1},
    {"unique": "yes"},
    {"row_names": [3, 4]},
    {"row_names": [[True]]},
    {"separator": 3},
    {"separator": [[3]]},
    {"delay": 0},
    {"inputs": IDS},
    {"input_ids": None},
]


@pytest.mark.parametrize("given", [*UNKNOWN, *WRONG], ids=lambda given: f"{given}"[:50])
def test_unsupported_arguments_are_refused_in_one_line(given: dict[str, Any], written: Any) -> None:
    key = next(iter(given))
    named = {"generation_config": "num_beams|do_sample|eos_token_id|dellay", "inputs": "input_ids"}.get(key, key)
    with pytest.raises(ValueError, match=rf"^({named}): found [^\n]*; (expected|more|nothing|without) [^\n]*$"):
        written(**given)


def test_neutral_values_are_accepted(written: Any) -> None:
    """transformers passes them with its defaults, and the model's settings may be passed again."""
    expected = written().tolist()
    same = {
        **dict.fromkeys(("logits_processor", "stopping_criteria", "streamer", "assistant_model", "synced_gpus")),
        "do_sample": False,
        "num_beams": 1,
        "temperature": 1,
        "repetition_penalty": 1.0,
        "num_return_sequences": 1,
        "eos_token_id": [1],
        "pad_token_id": 0,
        "max_new_tokens": 6,
        "bad_words_ids": [],
        "use_cache": True,
        "trust_remote_code": True,
        "custom_generate": ".",
        "revision": "main",
        "output_scores": False,
        "min_length": 0,
        "generation_config": NO_CONFIG(eos_token_id=1, num_beams=1, max_new_tokens=6),
    }
    assert written(**same).tolist() == expected
    assert written(generation_config=NO_CONFIG(return_dict_in_generate=True)).sequences.tolist() == expected
    assert written(generation_config=NO_CONFIG(num_beams=4), num_beams=1).tolist() == expected, "the argument counts"


def test_source_keeps_its_end_token_if_it_is_also_the_pad_token(tmp_path: Path) -> None:
    """As in transformers' own `generate`, no mask is inferred then."""
    generate = generate_of(dataclasses.replace(FEW_WORDS, pad_token_id=1), tmp_path)
    sources, whole = torch.randint(2, 9, (20, 4), generator=torch.Generator().manual_seed(0)), torch.ones((1, 4))
    sources[:, -1] = 1
    differ = 0
    for ids in sources[:, None]:
        expected = generate(input_ids=ids, attention_mask=whole.long()).tolist()
        assert generate(input_ids=ids).tolist() == expected
        differ += generate(input_ids=ids, attention_mask=(ids != 1).long()).tolist() != expected
    assert differ, "the end token of the source matters"


def test_labels_of_batch_do_not_change_answers(written: Any) -> None:
    expected = written().tolist()
    labels = {"labels": torch.tensor([[5, 1, -100]]), "decoder_attention_mask": torch.tensor([[1, 1, 0]])}
    for given in ({"labels": torch.tensor([[5, 1]])}, labels, {"decoder_input_ids": torch.tensor([[0]])}):
        assert written(**given, synced_gpus=False).tolist() == expected


@pytest.fixture(scope="module")
def directory(tokenizer_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that `to-hf` writes for a pipelined run."""
    place = tmp_path_factory.mktemp("of a run") / "model"
    params = oracle.random_params(MODEL, np.random.default_rng(3))
    run = Config(model=MODEL, data=DataConfig(task="jsonl", separator=" ; "), grid=GridConfig(time_max=9, sub_max=4))
    huggingface.write_hf(MODEL, params, place, tokenizer_files, run=run)
    return place


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # required by PEFT
@pytest.mark.parametrize("kind", ["collator with the model", "collator alone", "no labels", "of PEFT", "own generate"])
def test_seq2seq_trainer_predicts_rows(
    kind: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It predicts in batches, twice, with losses if there are labels; each answer equals that of its source alone."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    own = kind == "own generate"
    model: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(directory, trust_remote_code=own)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    how: dict[str, Any] = {} if own else {"custom_generate": str(directory), "trust_remote_code": True}
    if kind == "of PEFT":
        peft = pytest.importorskip("peft")
        settings = peft.LoraConfig(task_type="SEQ_2_SEQ_LM", r=2, target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(model, settings)
    examples = [
        dict(tokenizer(source)) | ({} if kind == "no labels" else {"labels": tokenizer(target)["input_ids"]})
        for source, target in (("a red fish", "a ; b"), ("the", "b"), ("2024 a b c", "5 ; 5 ; a red"), ("ab", "x"))
    ]
    model.eval()
    expected = [model.generate(input_ids=torch.tensor([x["input_ids"]]), **how)[0].tolist() for x in examples]
    assert len(set(map(str, expected))) > 1
    collate: Any = transformers.DataCollatorForSeq2Seq(tokenizer, model=None if kind == "collator alone" else model)
    if kind == "no labels":
        collate = transformers.DataCollatorWithPadding(tokenizer)
    args = transformers.Seq2SeqTrainingArguments(
        output_dir=str(tmp_path / "out"),
        predict_with_generate=True,
        per_device_eval_batch_size=2,
        report_to=[],
        dataloader_pin_memory=False,
    )
    trainer = transformers.Seq2SeqTrainer(model, args, data_collator=collate)
    for _ in range(2):
        found = trainer.predict(examples, **how)
        for ids, answer in zip(found.predictions, expected, strict=True):
            assert ids[: len(answer)].tolist() == answer and set(ids[len(answer) :].tolist()) <= {0, -100}
        assert ("test_loss" in found.metrics) == (kind != "no labels")


def test_settings_in_a_config_are_followed(written: Any) -> None:
    """They have the effect of settings in arguments."""
    how = {"return_dict_in_generate": True}
    steps = [written(time_max=n, **how).steps for n in (2, 5)]
    assert steps == [[2], [5]]
    assert [written(generation_config=NO_CONFIG(time_max=n), **how).steps for n in (2, 5)] == steps


def test_beams_in_generation_config_are_refused(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = written.__closure__[0].cell_contents
    monkeypatch.setattr(model.generation_config, "num_beams", 4)
    with pytest.raises(ValueError, match=r"^num_beams: found 4; expected 1: "):
        written()
    assert written(num_beams=1).shape[0] == 1
