"""A run as a Hugging Face directory and back: pipejax.json has its settings, README.md describes decoding."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers

import pipejax
from pipejax import checkpoint
from pipejax.apps.hub import model_card
from pipejax.config import Config, DataConfig, GridConfig, TrainConfig, to_json
from pipejax.convert import __main__ as convert
from pipejax.convert import description, huggingface, quantize
from pipejax.data import OWN_FILES, make_task
from pipejax.methods import split_rows
from pipejax.system.errors import UserError
from support import oracle, tiny

pytestmark = pytest.mark.usefixtures("compiled_once")

PARAMS = oracle.random_params(tiny.MODEL, np.random.default_rng(5), eos_scale=2.5)
IN_ROWS: dict[str, Any] = {
    "grid": {"delay": 1, "time_max": 9, "sub_max": 3},
    "data": {
        "task": "jsonl",
        "source_template": "notes : {note} things : {my-thing}",
        "separator": " # ",
        "max_source": 32,
        "train": "/home/someone/secret/train.jsonl",
        "dev": "/home/someone/secret/dev.jsonl",
        "tokenizer": "/home/someone/secret/tokenizer",
        "data_dir": "/home/someone/secret",
    },
    "train": {
        "method": "pipelined",
        "init_from": "/home/someone/secret/start",
        "wandb": "secret",
        "mlflow": "secret",
    },
    "decode": {"max_length": 11},
}
RECORDS = [{"note": "deliver small apples", "my-thing": "old maps"}, {"note": "the baker", "my-thing": "honey ; tea"}]
FILES = {"config.json", "generation_config.json", "model.safetensors", "pipejax.json", "README.md", "custom_generate"}


@pytest.fixture(autouse=True)
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables the kernel, which needs a C++ compilation."""
    monkeypatch.setenv("PIPEJAX_NATIVE", "off")


def run_of(directory: Path, tokenizer: Path | None, **sections: Any) -> Path:
    """A run as after a training, pipelined by default."""
    merged = {key: IN_ROWS.get(key, {}) | sections.get(key, {}) for key in {*IN_ROWS, *sections}}
    checkpoint.save_params(directory, tiny.change(tiny.RUN_ON_ONE, **merged), PARAMS, tokenizer_source=tokenizer)
    return directory


@pytest.fixture(scope="module")
def in_rows(tokenizer_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipelined run, and its Hugging Face directory `hf`. No test changes them."""
    root = tmp_path_factory.mktemp("rows")
    run_of(root / "run", tokenizer_files)
    huggingface.to_hf(root / "run", root / "hf")
    return root / "run"


@pytest.fixture
def there(in_rows: Path, tmp_path: Path) -> Path:
    """A copy of this Hugging Face directory that tests may change."""
    return Path(shutil.copytree(in_rows.with_name("hf"), tmp_path / "hf"))


def by_the_card(directory: Path, source: str) -> dict[str, Any]:
    """Runs the Python of README.md for another source; returns its variables."""
    [code] = re.findall(r"^```python\n(.*?)^```$", (directory / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    code, count = re.subn(
        r"^source = .*$", f"source = {source!r}", code.replace("DIRECTORY", str(directory)), flags=re.M
    )
    assert count == 1
    names: dict[str, Any] = {}
    exec(code, names)
    return names


def followed(directory: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Config, list[str]]:
    """The config of the checkpoint that is converted from a directory, and the lines printed by the conversion."""
    capsys.readouterr()
    huggingface.from_hf(directory, out)
    lines = capsys.readouterr().err.splitlines()
    return checkpoint.open_run(out).config, lines


def test_to_hf_writes_all_files_and_reports_one_line(
    in_rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "hf"
    huggingface.to_hf(in_rows, out)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("hf: ") and "README.md" in line
    assert "custom_generate/generate.py in the directory writes rows" in line
    tokenizer = {path.name for path in (in_rows / "tokenizer").iterdir()}
    assert {path.name for path in out.iterdir()} == FILES | tokenizer
    ids = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    assert json.loads((out / "generation_config.json").read_text()) == ids | {"max_new_tokens": 9}


def test_exported_files_hold_no_paths_and_secrets(in_rows: Path) -> None:
    files = [file for file in in_rows.with_name("hf").rglob("*") if file.is_file()]
    assert len(files) > len(FILES)
    for file in files:
        content = file.read_bytes()
        assert b"secret" not in content and b"someone" not in content, file
        assert str(in_rows.parent).encode() not in content, file


def test_round_trip_keeps_the_run(in_rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Records, method and template are equal; a second export writes the same files."""
    config, lines = followed(in_rows.with_name("hf"), tmp_path / "back", capsys)
    (line,) = lines
    assert line.startswith(f"{in_rows.with_name('hf')}/pipejax.json: followed for method (pipelined), grid, template")
    before = checkpoint.open_run(in_rows).config
    assert (config.grid, config.decode, config.model) == (before.grid, before.decode, before.model)
    assert config.train.method == "pipelined" and not config.train.init_from and not config.data.train
    assert config.data.source_template == "notes : {note} things : {my-thing}" and config.data.separator == " # "
    one, two = pipejax.load(in_rows), pipejax.load(tmp_path / "back")
    assert two.default_method == one.default_method == "pipelined"
    records = one.decode(RECORDS)
    assert two.decode(RECORDS) == records and any(len(record["rows"] or ()) > 1 for record in records)
    huggingface.to_hf(tmp_path / "back", tmp_path / "hf")
    for file in in_rows.with_name("hf").rglob("*"):
        if file.is_file():
            again = tmp_path / "hf" / file.relative_to(in_rows.with_name("hf"))
            assert again.read_bytes() == file.read_bytes(), file


@pytest.mark.slow
def test_transformers_writes_the_rows(in_rows: Path) -> None:
    """It follows README.md; without the file it writes the first row; files that it does not know have no effect."""
    directory = in_rows.with_name("hf")
    _, info = transformers.AutoModelForSeq2SeqLM.from_pretrained(directory, output_loading_info=True)
    assert not any(info.values()), info
    t5 = pipejax.load(in_rows)
    record = t5.decode(RECORDS)[0]
    names = by_the_card(directory, "notes : deliver small apples things : old maps")
    assert names["answer"].rows == [record["row_ids"]] and len(record["row_ids"]) > 1
    assert names["rows"] == record["rows"]
    known = [word for word in (record["text"] or "").split() if word != "#"]  # this tokenizer lacks the token
    assert names["text"].split() == known
    assert (names["answer"].steps, names["answer"].truncated) == ([record["steps"]], [record["truncated"]])
    ids = names["model"].generate(**names["ids"])[0, 1:].tolist()
    ids = ids[: ids.index(1)] if 1 in ids else ids
    assert ids == record["row_ids"][0]
    with pytest.raises(ValueError, match=r"^num_beams: found 4; expected 1: rows are written greedily"):
        names["model"].generate(**names["ids"], **names["how"], num_beams=4)
    card = (directory / "README.md").read_text()
    assert "writes only the first row" in card
    assert f"'notes : {{note}} things : {{my-thing}}'.format_map({dict.fromkeys(('note', 'my-thing'), '...')})" in card
    assert '{"note": "...", "my-thing": "..."}' in card and "' # '" in card and "3 rows and 9 steps" in card


def test_the_card_has_metadata_and_scores(in_rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """huggingface_hub reads them; scores of other weights are refused."""
    origin = checkpoint.fingerprint.digest(checkpoint.open_run(in_rows).arrays["params"])
    scores = {"task": "demo", "split": "test", "params_fp": origin, "strategy": "pipelined", "examples": 8}
    scores |= {"metric": "spans", "em_f1": 71.256, "pm_f1": 80.5, "steps": 9.25, "calls": 3}
    (tmp_path / "scores.json").write_text(json.dumps(scores))
    argv = ["to-hf", in_rows, tmp_path / "hf", "--base-model", "google/t5-small", "--scores", tmp_path / "scores.json"]
    assert convert.main([*map(str, argv)]) == 0
    assert "--scores" not in capsys.readouterr().err
    card = huggingface_hub.ModelCard.load(tmp_path / "hf" / "README.md")
    assert (card.data.base_model, card.data.library_name) == ("google/t5-small", "transformers")
    found = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert found == {"em_f1": 71.26, "pm_f1": 80.5}
    assert "| em_f1 | 71.26 |" in card.text and "8 examples, 9.2 decoder steps" in card.text
    (tmp_path / "scores.json").write_text(json.dumps(scores | {"params_fp": "0" * 16}))
    with pytest.raises(UserError, match=r"scores.json: params_fp: found '0{16}'; expected '[0-9a-f]{16}'"):
        huggingface.to_hf(in_rows, tmp_path / "other", scores=tmp_path / "scores.json")
    del scores["split"], scores["steps"]
    (tmp_path / "scores.json").write_text(json.dumps(scores))
    huggingface.to_hf(in_rows, tmp_path / "other", scores=tmp_path / "scores.json")
    assert "--scores: README.md has no scores: found no steps, split in the file;" in capsys.readouterr().err
    assert "## Scores" not in (tmp_path / "other" / "README.md").read_text()


@pytest.mark.parametrize("task, named", [("kp20k", "kp20k"), ("demo", "demo"), *((task, None) for task in OWN_FILES)])
def test_the_card_names_the_data_of_its_scores(task: str, named: str | None) -> None:
    """A local file has no name on the hub; its scores are in the table only."""
    scores = {"task": task, "split": "test", "examples": 8, "metric": "spans", "em_f1": 71.2, "steps": 9.0}
    config = Config(data=DataConfig(task="jsonl"), train=TrainConfig(method="pipelined"))
    text = model_card.card("k", config, tokenizer=True, origin=description.ModelOrigin(scores=scores))
    data: Any = huggingface_hub.ModelCard(text).data
    found = data.eval_results or []
    assert [result.dataset_type for result in found] == ([named] if named else [])
    assert "| em_f1 | 71.20 |" in text and (f"type: {task}\n" in text) == (named is not None)


def test_the_card_has_the_command_of_scores_of_another_decoder() -> None:
    """These scores are only in the table: the hub has no place for the command."""
    scores = {"task": "kp20k", "split": "test", "limit": 10, "beams": 4, "length_penalty": 1.0, "method": "sequential"}
    scores |= {"examples": 8, "metric": "spans", "em_f1": 71.2, "steps": 9.0}
    config = Config(data=DataConfig(task="jsonl"), train=TrainConfig(method="pipelined"))
    text = model_card.card("k", config, tokenizer=True, origin=description.ModelOrigin(scores=scores))
    assert "--split test --method sequential --limit 10 --set decode.beams=4`" in text
    assert "| em_f1 | 71.20 |" in text
    data: Any = huggingface_hub.ModelCard(text).data
    assert not data.eval_results


@pytest.mark.parametrize("separator", [" # ", "; ", " ; "])
def test_the_code_of_the_card_splits_an_answer_as_pipejax_does(separator: str) -> None:
    config = Config(data=DataConfig(separator=separator), train=TrainConfig(method="sequential"))
    text = model_card.card("k", config, tokenizer=True)
    code = text.split("```python\n", 1)[1].split("```", 1)[0].splitlines()
    names: dict[str, Any] = {}
    exec(next(line for line in code if line.startswith("import re")), names)
    (rows,) = (line for line in code if line.startswith("rows = "))
    for answer in ("C# language # Python", "a;b; c", "C; D ; E", "", "a ;", "; a", "a  #  b#", " # "):
        exec(rows, names | {"text": answer}, names)
        assert names["rows"] == split_rows(answer, separator)


@pytest.mark.parametrize("license", ["apache-2.0", "cc-by-nc-4.0", ""])
def test_the_card_names_a_license(license: str, in_rows: Path, tmp_path: Path) -> None:
    argv = ["to-hf", in_rows, tmp_path / "hf", *(["--license", license] if license else [])]
    assert convert.main([*map(str, argv)]) == 0
    assert huggingface_hub.ModelCard.load(tmp_path / "hf" / "README.md").data.license == (license or None)


@pytest.mark.parametrize(
    "delay, words", [(1, "a new one every step ("), (2, "every 2 steps ("), (7, "every 7 steps (")]
)
def test_card_describes_when_rows_begin(delay: int, words: str) -> None:
    config = Config(grid=GridConfig(delay=delay), train=TrainConfig(method="pipelined"))
    text = model_card.card("k", config, tokenizer=True)
    assert words in text and "every 1 steps" not in text


def test_the_card_of_a_published_task_has_its_template() -> None:
    config = Config(data=DataConfig(task="kp20k"), train=TrainConfig(method="pipelined"))
    card = model_card.card("k", config, tokenizer=True)
    assert '{"title": "...", "abstract": "..."}' in card and make_task(config.data).template in card


@pytest.mark.parametrize(
    ("method", "decode", "line"),
    [
        ("pipelined", {"limit": "source"}, "decode.limit: only pipejax limits answers to source"),
        ("sequential", {"limit": "source"}, "decode.limit: only pipejax limits answers to source"),
        ("pipelined", {"temperature": 0.7}, "decode.temperature: only pipejax samples the rows"),
        ("sequential", {"temperature": 0.7}, ""),
        (
            "sequential",
            {"repetition_penalty": 1.3},
            "decode.repetition_penalty: in transformers the tokens of separators",
        ),
        (
            "sequential",
            {"no_repeat_ngram_size": 2, "repetition_scope": "row"},
            "decode.no_repeat_ngram_size: in transformers the tokens of separators, and of the rows before",
        ),
        ("none", {"repetition_penalty": 1.3}, ""),
    ],
)
def test_settings_that_transformers_reads_otherwise_are_reported(
    method: str, decode: Any, line: str, tokenizer_files: Path, tmp_path: Path, capsys: Any
) -> None:
    run = run_of(tmp_path / "run", tokenizer_files, train={"method": method}, decode=decode)
    huggingface.to_hf(run, tmp_path / "hf")
    lines = [text for text in capsys.readouterr().err.splitlines() if "decode." in text]
    assert (line in lines[0] and len(lines) == 1) if line else not lines


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 3])
def test_sequential_run_is_exported(beams: int, tokenizer_files: Path, tmp_path: Path, capsys: Any) -> None:
    """transformers writes its whole answer, with beams if it has them, and the code of the card splits the rows."""
    sections = {"train": {"method": "sequential"}, "decode": {"beams": beams, "length_penalty": 2.0}}
    run = run_of(tmp_path / "run", tokenizer_files, **sections, data={"source_template": "", "separator": " the "})
    huggingface.to_hf(run, tmp_path / "hf")
    assert capsys.readouterr().err == ""
    generation = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert generation["max_new_tokens"] == 11 and generation.get("num_beams", 1) == beams
    record = pipejax.load(run).decode(["deliver small apples and the baker"])[0]
    names = by_the_card(tmp_path / "hf", "deliver small apples and the baker")
    text = record["text"]
    assert text and names["text"].split() == text.split()
    assert names["rows"] == split_rows(text, " the ")
    config, _ = followed(tmp_path / "hf", tmp_path / "back", capsys)
    assert config.train.method == "sequential" and config.decode.beams == beams
    assert pipejax.load(tmp_path / "back").decode(["deliver small apples and the baker"]) == [record]


@pytest.mark.slow
def test_quantized_run_is_exported(in_rows: Path, tmp_path: Path, capsys: Any) -> None:
    """Weights are exported at their rounded values, which are rounded again for decoding."""
    quantize(in_rows, tmp_path / "int8", weights="int8")
    huggingface.to_hf(tmp_path / "int8", tmp_path / "hf")
    config, _ = followed(tmp_path / "hf", tmp_path / "back", capsys)
    assert config.decode.weights == "int8"
    assert pipejax.load(tmp_path / "back").decode(RECORDS) == pipejax.load(tmp_path / "int8").decode(RECORDS)


def test_a_converted_checkpoint_keeps_its_settings(there: Path, tmp_path: Path, capsys: Any) -> None:
    """It was not trained here: its decoder and its settings are those of generation_config.json."""
    (there / "pipejax.json").unlink()
    settings = {"decoder_start_token_id": 0, "eos_token_id": 1, "num_beams": 2, "length_penalty": 0.5}
    (there / "generation_config.json").write_text(json.dumps(settings))
    before, _ = followed(there, tmp_path / "one", capsys)
    huggingface.to_hf(tmp_path / "one", tmp_path / "again")
    after, _ = followed(tmp_path / "again", tmp_path / "two", capsys)
    assert (before.decode.beams, before.decode.length_penalty, before.train.method) == (2, 0.5, "none")
    assert to_json(after).replace('"again"', '"hf"') == to_json(before)
    assert "was converted and not trained since" in (tmp_path / "again" / "README.md").read_text()


def test_sampling_named_rows_and_drafter_are_kept(tokenizer_files: Path, tmp_path: Path, capsys: Any) -> None:
    names = ("small", "old")
    drawn = {"temperature": 0.5, "top_k": 4, "top_p": 0.75, "min_p": 0.25}
    run = run_of(tmp_path / "one", None, train={"method": "sequential"}, decode=drawn)
    huggingface.to_hf(run, tmp_path / "drawn")
    generation = json.loads((tmp_path / "drawn" / "generation_config.json").read_text())
    assert {key: generation[key] for key in drawn} == drawn and generation["do_sample"] is True
    transformers.GenerationConfig.from_pretrained(tmp_path / "drawn").validate(strict=True)
    assert followed(tmp_path / "drawn", tmp_path / "back", capsys)[0].decode == checkpoint.open_run(run).config.decode
    assert "The directory has no tokenizer" in (tmp_path / "drawn" / "README.md").read_text()

    drafted = {"draft": "model", "draft_checkpoint": "/home/someone/secret/small", "trace": True}
    run = run_of(tmp_path / "two", tokenizer_files, grid={"row_names": names, "delay": 0}, decode=drafted)
    capsys.readouterr()
    huggingface.to_hf(run, tmp_path / "named")
    assert "decode.draft: pipejax.json has none instead of model" in capsys.readouterr().err
    assert "someone" not in (tmp_path / "named" / "pipejax.json").read_text()
    config, _ = followed(tmp_path / "named", tmp_path / "named-back", capsys)
    assert config.grid.row_names == names and config.grid.delay == 0
    assert (config.decode.draft, config.decode.draft_checkpoint, config.decode.trace) == ("none", "", False)
    card = (tmp_path / "named" / "README.md").read_text()
    assert "'small', 'old'" in card and "all from the first step on" in card


def test_changed_weights_and_settings_are_reported(there: Path, tmp_path: Path, capsys: Any) -> None:
    model = transformers.T5ForConditionalGeneration.from_pretrained(there)
    with torch.no_grad():
        model.shared.weight[5] += 1
    model.generation_config.max_new_tokens = 4
    model.generation_config.no_repeat_ngram_size = 3
    model.save_pretrained(there)  # as after a training by transformers, which keeps pipejax.json
    config, lines = followed(there, tmp_path / "out", capsys)
    assert config.train.method == "pipelined" and config.decode.max_length == 11
    assert lines[1:] == [
        f"{there}/pipejax.json: written for other weights; correct only if these weights were trained with the same "
        "settings",
        f"{there}/generation_config.json: ignored, since pipejax.json has priority: max_new_tokens=4, "
        "no_repeat_ngram_size=3",
    ]


def changed(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        values = json.loads(file.read_text())
        change(values)
        file.write_text(json.dumps(values))

    return write


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no JSON": (lambda file: file.write_text("{"), "found no JSON"),
    "a list": (lambda file: file.write_text("[1]"), "found [1]; expected a JSON object"),
    "a pointer": (lambda file: file.write_text("version https://git-lfs.github.com/spec/v1\n"), "a git-LFS pointer"),
    "newer": (
        changed(lambda v: v.update(format=2)),
        "format: found 2; expected 1",
    ),
    "no format": (changed(lambda v: v.pop("format")), "format: found None; expected 1"),
    "no config": (changed(lambda v: v.pop("config")), "config: top level: found NoneType; expected an object"),
    "a key of a later day": (changed(lambda v: v["config"]["grid"].update(depth=1)), "grid.depth: unknown key"),
    "text for a number": (changed(lambda v: v["config"]["grid"].update(delay="1")), "grid.delay: found '1'"),
    "no such method": (changed(lambda v: v["config"]["train"].update(method="x")), "train.method: found 'x'"),
    "against config.json": (
        changed(lambda v: v["config"]["decode"].update(beams=33)),
        "decode.beams: found 33; expected at most half of model.vocab_size = 64",
    ),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_file_raises_one_line(case: str, there: Path, tmp_path: Path) -> None:
    damage, words = DAMAGES[case]
    damage(there / "pipejax.json")
    with pytest.raises(UserError) as caught:
        huggingface.from_hf(there, tmp_path / "out")
    message = str(caught.value)
    assert message.startswith(f"{there}/pipejax.json: ") and words in message and "\n" not in message, message
    assert not (tmp_path / "out").exists()
