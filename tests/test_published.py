"""Published data sets: small files in the layouts of publishers are prepared and read, malformed ones refused."""

import gzip
import hashlib
import json
import shutil
import tempfile
from pathlib import Path

import pytest
from tensorflow_datasets.datasets.scientific_papers import scientific_papers_dataset_builder as scientific_papers
from tensorflow_datasets.summarization import cnn_dailymail as tfds_cnn_dailymail
from tensorflow_datasets.summarization.wikihow import Wikihow

from pipejax.apps.papers.builders import BUILDERS, prepare_data_set
from pipejax.apps.papers.data_sets import PUBLISHED
from pipejax.apps.statistics.data_command import main
from pipejax.apps.statistics.split_statistics import measure_split
from pipejax.config import Config, DataConfig
from pipejax.data import PAPERS, make_task
from pipejax.data.encoding import encode_example
from pipejax.data.examples import Example
from pipejax.data.tokenizer import Tokenizer
from pipejax.system import cli
from pipejax.system.errors import UserError
from support.published_files import (
    CASES,
    HEADLINES,
    HOW_TO,
    KEYWORDS,
    MSQA,
    NEWS,
    PAPER,
    STORY,
    TRAIN,
    in_lines,
    lay,
    story,
    wrapped,
)
from support.tiny import MODEL

pytestmark = pytest.mark.usefixtures("compiled_once")


def prepared(name, manual, root):
    """The task, after its files are prepared."""
    prepare_data_set(PUBLISHED[name], manual_dir=str(manual), data_dir=str(root))
    return make_task(DataConfig(task=name, data_dir=str(root)))


def refused(name, manual, root):
    with pytest.raises(UserError) as caught:
        prepare_data_set(PUBLISHED[name], manual_dir=str(manual) if manual else "", data_dir=str(root))
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert not list(Path(root).rglob("dataset_info.json"))
    return message


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "zipped"])
@pytest.mark.parametrize("name", CASES)
def test_prepared_and_read_back(name, zipped, tmp_path):
    files, expected = CASES[name]
    task = prepared(name, lay(tmp_path / "manual", files, zipped), tmp_path / "data")
    for split, examples in expected.items():
        assert list(task.examples(split)) == [Example(*example) for example in examples]
    assert task.tokenizer() is None
    assert task.metric == PUBLISHED[name].metric


def test_every_published_task_has_a_case():
    assert tuple(PUBLISHED) == PAPERS  # the names, which are known without the descriptions
    assert CASES.keys() == PUBLISHED.keys()
    assert {published.directory.partition("/")[0] for published in PUBLISHED.values()} == BUILDERS.keys()


def test_random_access_and_slices(tmp_path):
    task = prepared("msqa", lay(tmp_path / "manual", CASES["msqa"][0]), tmp_path / "data")
    examples = task.examples("train")
    whole = [examples[i] for i in range(len(examples))]
    assert examples[-1] == whole[-1] and examples[1:7:2] == whole[1:7:2] and list(examples) == whole
    with pytest.raises(IndexError):
        examples[len(examples)]


def test_msqa_takes_its_dev_from_train(tmp_path):
    """Digests of ids select the split, for any order of the file; the unlabelled test file is not used."""
    unlabelled = {"id": "x", "question": ["who"], "context": ["Ann"]}
    files = {"train.json": wrapped(*TRAIN), "valid.json": wrapped(MSQA), "test.json": wrapped(unlabelled)}
    turned = files | {"train.json": wrapped(*reversed(TRAIN))}
    tasks = [
        prepared("msqa", lay(tmp_path / f"manual{i}", f), tmp_path / str(i)) for i, f in enumerate((files, turned))
    ]
    for task in tasks:
        ids = {split: {e.id for e in task.examples(split)} for split in ("train", "dev", "test")}
        names = sorted((record["id"] for record in TRAIN), key=lambda n: hashlib.blake2b(n.encode()).hexdigest())
        assert ids == {"dev": set(names[:2]), "train": set(names[2:]), "test": {"a"}}


def test_msqa_with_a_released_dev_split(tmp_path):
    record = {"id": "a", "question": "who ?", "context": "Ann sang", "answers": [["Ann", [0, 3]]]}
    files = {f"{name}.json": json.dumps([record | {"id": name}], indent=1) for name in ("train", "valid", "test")}
    task = prepared("msqa", lay(tmp_path / "manual", files), tmp_path / "data")
    expected = [[Example(name, "Question: who ? Context: Ann sang", ("Ann",))] for name in ("train", "valid", "test")]
    assert [list(task.examples(split)) for split in ("train", "dev", "test")] == expected


def test_kp20k_as_released(tmp_path):
    files = {"kp20k_training.json": in_lines(KEYWORDS), "kp20k_testing.json": in_lines(KEYWORDS | {"keyword": ""})}
    task = prepared("kp20k", lay(tmp_path / "manual", files), tmp_path / "data")
    source = "Title: Graph # one Context: Sets of trees."
    assert list(task.examples("train")) == [Example("train-0", source, ("graph", "absent thing", "tree"))]
    assert list(task.examples("test")) == [Example("test-0", source, ())]  # "trees." is no form of "tree"


def test_kptimes_file_with_a_json_array_is_read(tmp_path):
    record = {"source": "Ice <eos> It thaws", "target": "Climate;thaw"}
    task = prepared("kptimes", lay(tmp_path / "m", {"dev.json": json.dumps([record], indent=2)}), tmp_path / "data")
    assert list(task.examples("dev")) == [Example("dev-0", "Title: Ice Context: It thaws", ("thaw", "Climate"))]


def test_sumpubmed_is_split_by_digests_of_numbers(tmp_path):
    """The remainder of `b2sum -l 64` by 20 is 0 for dev and 1 for test."""
    files = {f"line_text/text_{number}.txt": f"Article {number}.\n" for number in range(1, 61)}
    files |= {f"shorter_abstract/abst_{number}.txt": f"Summary {number}.\n" for number in range(1, 61)}
    found = records("sumpubmed", lay(tmp_path / "manual", files), tmp_path / "data")
    numbers = {split: [int(record["id"]) for record in part] for split, part in found.items()}
    apart = {"dev": [2, 30, 52], "test": [3, 9, 29, 40]}
    assert {split: sorted(numbers[split]) for split in apart} == apart
    assert sorted(number for part in numbers.values() for number in part) == [*range(1, 61)]


def test_sumpubmed_splits_and_spelling(tmp_path):
    task = prepared("sumpubmed", lay(tmp_path / "manual", CASES["sumpubmed"][0]), tmp_path / "data")
    splits = {split: list(task.examples(split)) for split in ("train", "dev", "test")}
    assert sorted(int(e.id) for part in splits.values() for e in part) == list(range(60))
    assert 0 < len(splits["dev"]) < 10 and 0 < len(splits["test"]) < 10
    example = splits["dev"][0]
    assert example.source == f"summarize: BACKGROUND mouse {example.id} [cit] ."
    assert example.targets == ("mice # .", f"cat {example.id} .")


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """The folder of temporary files. Each TFDS builder leaves a directory there."""
    directory = tmp_path / "scratch"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


def test_no_temporary_directory_is_left(tmp_path, scratch):
    manual = lay(tmp_path / "manual", CASES["msqa"][0])
    assert prepared("msqa", manual, tmp_path / "data").examples("train")
    with pytest.raises(UserError, match="no such directory"):
        prepare_data_set(PUBLISHED["msqa"], manual_dir=str(tmp_path / "no"), data_dir=str(tmp_path / "more"))
    assert not [*scratch.iterdir()]


# TFDS's own builders read the same files as we do.


def records(name, directory, data_dir):
    """The written records, by TFDS's names of the splits."""
    import tensorflow_datasets as tfds

    prepare_data_set(PUBLISHED[name], manual_dir=str(directory), data_dir=str(data_dir))
    builder = tfds.builder_from_directory(str(data_dir / PUBLISHED[name].directory))
    sources = {split: builder.as_data_source(split=split) for split in builder.info.splits}
    return {
        split: [{key: value.decode() for key, value in record.items()} for record in source]
        for split, source in sources.items()
    }


def test_pubmed_equals_tfds(tmp_path, scratch):
    files = {"train.txt": in_lines(PAPER, PAPER | {"article_id": "p2", "article_text": ["", "a\tb"]})}
    ours = records("pubmed", lay(tmp_path / "manual", files), tmp_path / "data")
    builder = scientific_papers.Builder(config="pubmed", data_dir=str(tmp_path))
    theirs = builder._generate_examples(str(tmp_path / "manual" / "train.txt"))
    assert ours == {"train": [record for _, record in theirs]}


def test_wikihow_equals_tfds(tmp_path, scratch):
    rows = HEADLINES + '"All of it is summary","How to Nap","All of it is text"\n\n"",How to Sit,Sit down\n'
    files = {"wikihowAll.csv": "headline,title,text\n" + rows, "all_train.txt": "HowtoPaint1\nHowtoNap\nHowtoSit\n"}
    manual = lay(tmp_path / "manual", files)
    ours = records("wikihow", manual, tmp_path / "data")
    builder = Wikihow(config="all", data_dir=str(tmp_path))
    titles = {"HowtoPaint1", "HowtoNap", "HowtoSit"}
    assert ours == {"train": [r for _, r in builder._generate_examples(str(manual / "wikihowAll.csv"), titles)]}


def test_cnn_dailymail_equals_tfds(tmp_path, scratch, monkeypatch):
    texts = [STORY, "A caption\nIt said \u201cno\u201d\nwhy?\n@highlight\nNo"]
    texts += ["only highlights\n\n@highlight\n", "@highlight\nx"]
    urls = [f"http://{i}" for i in range(len(texts))]
    files = {story(url): text for url, text in zip(urls, texts, strict=True)} | {"all_train.txt": "\n".join(urls)}
    manual = lay(tmp_path / "manual", files)
    ours = records("cnn_dailymail", manual, tmp_path / "data")

    # TFDS reads the file with TensorFlow; what it makes of the lines is plain Python.
    def read(path):
        return [line.strip() for line in Path(path).read_text().split("\n")]

    monkeypatch.setattr(tfds_cnn_dailymail, "_read_text_file", read)
    builder = tfds_cnn_dailymail.CnnDailymail(data_dir=str(tmp_path))
    stories = sorted(str(manual / story(url)) for url in urls)
    assert ours == {"train": [record for _, record in builder._generate_examples({"cnn": stories})]}
    assert len(ours["train"]) == 2


# Refusals.


@pytest.mark.parametrize(
    "name, files, words",
    [
        ("msqa", {}, ["found no train.json or dev.json or valid.json or test.json", "https://multi-span.github.io"]),
        ("msqa", {"test.json": wrapped()}, ["found no labelled train.json or valid.json"]),
        ("msqa", {"valid.json": wrapped()}, ["split 'test': found no records"]),
        ("msqa", {"valid.json": '{"data": []'}, ["split 'test'"]),
        ("msqa", {"valid.json": "{}"}, ["valid.json:1: found no JSON array"]),
        ("msqa", {"valid.json": '{"data": [{"id": "a"},]}'}, ['valid.json:1: record 1: found no "question"']),
        ("msqa", {"valid.json": wrapped(MSQA, 3)}, ["valid.json:1: record 2: found the number 3"]),
        ("msqa", {"valid.json": wrapped(MSQA)[:-2]}, ["valid.json:1: record 1: found no comma or ]"]),
        ("msqa", {"valid.json": "[]\n[]"}, ["valid.json: found '[]' after the array; expected the end of the file"]),
        ("msqa", {"valid.json": wrapped(MSQA, MSQA)}, ["record 2", "found 'a' again", "valid.json:1: record 1"]),
        ("msqa", {"valid.json": wrapped(MSQA | {"label": ["B"]})}, ['"label": found 1 labels for 6 words']),
        ("msqa", {"valid.json": wrapped(MSQA | {"label": list("OIOOOO")})}, ["found 'I' after 'O'"]),
        ("msqa", {"train.json": wrapped(*TRAIN), "valid.json": "[]"}, ["official layout"]),
        ("msqa", {"a/train.json": "[]", "b/train.json": "[]"}, ["a/train.json", "b/train.json; expected one"]),
        (
            "msqa",
            {"test.json": '[\n{"id": "a", "context": "x", "answers": [3]}]'},
            ["test.json:2: record 1", "answers"],
        ),
        ("msqa", {"x.zip": b"PK no zip"}, ["x.zip: cannot be read", "expected a zip"]),
        ("kp20k", {"train_src.txt": "a <eos> b\n"}, ["found no train_trg.txt"]),
        (
            "kp20k",
            {"train_src.txt": "a <eos> b\nc", "train_trg.txt": "x\n"},
            ["train_src.txt:2: found no line", "train_trg.txt; expected"],
        ),
        (
            "kp20k",
            {"train_src.txt": "a <eos> b\n", "train_trg.txt": "x\ny\n"},
            ["train_trg.txt:2: found no line", "train_src.txt; expected"],
        ),
        ("kp20k", {"train_src.txt": "\n", "train_trg.txt": "x\n"}, ["train_src.txt:1: found no <eos>"]),
        ("kp20k", {"train_src.txt": "a\n", "train_trg.txt": "x\n"}, ["train_src.txt:1: found no <eos>"]),
        ("kp20k", {"train_src.txt": b"a <eos> \xff\n", "train_trg.txt": "x\n"}, ["train_src.txt:1: found byte 0xff"]),
        ("kp20k", {"kp20k_training.json": in_lines({"title": "a"})}, ['kp20k_training.json:1: found no "abstract"']),
        (
            "kptimes",
            {"train.jsonl": in_lines(NEWS | {"keyword": 3})},
            ["train.jsonl:1", '"keyword": found the number 3'],
        ),
        ("kptimes", {"train.jsonl": in_lines(NEWS, NEWS)}, ["train.jsonl:2", "'ny1' again", "train.jsonl:1"]),
        ("kptimes", {"train.jsonl": "{}\n"}, ['train.jsonl:1: found no "id"']),
        ("kptimes", {"train.jsonl": "{\n"}, ["train.jsonl:1: not JSON"]),
        ("wikihowqa", {"train.txt": HOW_TO}, ["found no summary.txt"]),
        ("wikihowqa", {"train.txt": HOW_TO, "summary.txt": "a1\tx\ty\n"}, ["train.txt:3: found no answer 'a2'"]),
        ("wikihowqa", {"train.txt": "a\tb\n", "summary.txt": ""}, ["train.txt:1: found 2 columns"]),
        ("wikihowqa", {"train.txt": HOW_TO, "summary.txt": "a1\n"}, ["summary.txt:1: found 1 column"]),
        ("sumpubmed", {"line_text/text_1.txt": "x"}, ["found no shorter_abstract/"]),
        ("sumpubmed", {"shorter_abstract/abst_1.txt": "x", "line_text/text_2.txt": "x"}, ["found no line_text/text_1"]),
        ("cnn_dailymail", {"all_val.txt": "u\n"}, ["found no stories/"]),
        ("cnn_dailymail", {"all_val.txt": "u\n", "stories/x.story": STORY}, ["split 'validation': found no records"]),
        ("pubmed", {"train.txt": in_lines(PAPER | {"article_text": "x"})}, ['train.txt:1: "article_text": found text']),
        ("wikihow", {"all_train.txt": "x\n"}, ["found no wikihowAll.csv"]),
        ("wikihow", {"all_train.txt": "x\n", "wikihowAll.csv": "a,b\n1\n"}, ["wikihowAll.csv:2: found 1 column"]),
        ("wikihow", {"all_train.txt": "x\n", "wikihowAll.csv": "a,b\n1,2\n"}, ['csv:2: found no "headline"']),
    ],
)
def test_malformed_files_are_refused(name, files, words, tmp_path):
    message = refused(name, lay(tmp_path / "manual", files), tmp_path / "data")
    assert all(word in message for word in words), message


@pytest.mark.parametrize("name", PUBLISHED)
def test_message_about_an_absent_directory_names_needed_files(name, tmp_path):
    message = refused(name, tmp_path / "no", tmp_path / "data")
    assert message == f"--manual-dir {tmp_path / 'no'}: no such directory; expected {PUBLISHED[name].files}"
    assert "https://" in message


def test_missing_files_and_missing_tensorflow_are_reported(tmp_path):
    assert "--manual-dir: found none; expected a directory with train.json" in refused("msqa", "", tmp_path)
    if shutil.which("saved_model_cli"):
        pytest.skip("TensorFlow is installed: TFDS would start a download")
    assert "found no TensorFlow, which TFDS needs to download it" in refused("pubmed", "", tmp_path)


def test_absent_split_is_reported_and_empty(tmp_path, said):
    manual = lay(tmp_path / "manual", {"valid.json": wrapped(MSQA)})
    for _ in range(2):
        prepare_data_set(PUBLISHED["msqa"], manual_dir=str(manual), data_dir=str(tmp_path / "data"))
    assert "no split 'train'" in said[0]
    assert "already prepared" in said[-1]
    task = make_task(DataConfig(task="msqa", data_dir=str(tmp_path / "data")))
    assert len(task.examples("train")) == 0 and len(task.examples("test")) == 1


def test_unprepared_data_set_is_refused(tmp_path):
    task = make_task(DataConfig(task="pubmed", data_dir=str(tmp_path)))
    with pytest.raises(UserError, match=r"data_dir: found no scientific_papers/pubmed/1.1.1 in .*prepare pubmed"):
        task.examples("train")


# The commands.


def run(capsys, *flags):
    """The exit code, standard output, and standard error of a command."""
    with pytest.raises(SystemExit) as caught:
        cli.run(main, [str(flag) for flag in flags])
    out, err = capsys.readouterr()
    return caught.value.code, out, err


def test_prepare_and_stats(tmp_path, capsys):
    manual = lay(tmp_path / "manual", CASES["kptimes"][0])
    code, out, _ = run(capsys, "prepare", "kptimes", "--manual-dir", manual, "--data-dir", tmp_path / "data")
    assert (code, out) == (0, f"{tmp_path / 'data' / 'kptimes' / '1.0.0'}\n")
    code, out, err = run(capsys, "stats", "kptimes", "--data-dir", tmp_path / "data", "--json")
    found = json.loads(out)
    assert code == 0 and "only words" in err
    assert (found["task"], found["time_max"], found["sub_max"]) == ("kptimes", 50, 20)
    means = dict.fromkeys(("words_per_target", "rows_per_target", "words_per_row"), 1.0)
    assert found["splits"]["test"] == {"examples": 2, "without_target": 1, **means}
    code, out, _ = run(capsys, "stats", "kptimes", "--data-dir", tmp_path / "data", "--split", "train")
    assert code == 0 and out.splitlines()[1].split() == ["train", "1", "3.0", "3.00", "1.00", "0"]


def test_statistics_of_tokens(capsys):
    """The tokens of the embedded task are its words, so all counts can be computed by hand."""
    flags = ["stats", "demo", "--split", "dev", "--json", "--set", "grid.time_max=6", "--set", "grid.sub_max=4"]
    code, out, _ = run(capsys, *flags, "--set", "data.max_target=12")
    found = json.loads(out)["splits"]["dev"]
    examples = make_task(DataConfig(task="demo")).examples("dev")
    lengths = [[len(row.split()) for row in e.targets] for e in examples]
    sequential = [sum(rows) + len(rows) for rows in lengths]
    pipelined = [max([i + m + 1 for i, m in enumerate(rows)] + [len(rows) + 1]) for rows in lengths]
    late = [any(i + m + 1 > 6 for i, m in enumerate(rows[:4])) for rows in lengths]
    many = [len(rows) > 4 for rows in lengths]
    assert code == 0
    assert found["step_ratio"] == pytest.approx(sum(sequential) / sum(pipelined))
    assert found["tokens"]["sequential_steps"]["most"] == max(sequential)
    of_sources = sorted(len(e.source.split()) + 1 for e in examples)
    assert found["tokens"]["source"]["median"] == of_sources[len(examples) // 2]
    # On the grid, with at most six steps and four rows.
    written = [[row[: max(6 - i, 0)] for i, row in enumerate(range(m) for m in rows[:4])] for rows in lengths]
    kept = sum(len(row) for rows in written for row in rows)
    assert 0 < kept < sum(map(sum, lengths))
    assert found["kept_percent"] == pytest.approx(100 * kept / sum(map(sum, lengths)))
    ends = [[i + m + 1 for i, m in enumerate([*rows, 0][:4])] for rows in lengths]  # the empty row counts
    bounded = [min(max(times), 6) for times in ends]
    assert found["bounded_ratio"] == pytest.approx(sum(sequential) / sum(bounded))
    assert found["kept_ratio"] == pytest.approx((kept + sum(map(len, written))) / sum(bounded))
    cuts = {
        "max_source": 0.0,
        "max_target": sum(n + 1 > 12 for n in sequential),
        "time_max": sum(late),
        "sub_max": sum(many),
        "either": sum(a or b for a, b in zip(late, many, strict=True)),
    }
    assert found["cut_percent"] == {name: pytest.approx(100 * n / len(examples)) for name, n in cuts.items()}
    assert 0 < sum(late) < sum(many) < len(examples)
    assert found["changed_percent"] == {"sources": 0, "targets": 0, "joined": 0} and found["changed_first"] == {}


def test_rows_and_texts_are_counted_as_training_takes_them(tmp_path, tokenizer_files, capsys):
    """Rows without tokens do not count: two rows and five tokens with the eos are 4 steps, not 7."""
    rows = ["sang", "</s>", "</s> </s>", "slept", "~ { }"]
    lines = [
        {"source": "the baker </s>", "targets": rows},
        {"source": "the baker", "targets": ["</s>"]},
        {"source": "the  baker", "targets": ["sang\n"]},
        {"source": "the baker .", "targets": []},
    ]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["stats", "jsonl", "--tokenizer", str(tokenizer_files), "--set", f"data.train={tmp_path / 'own.jsonl'}"]
    found = json.loads(run(capsys, *flags, "--json")[1])["splits"]["train"]
    assert found["rows_per_target"] == (3 + 0 + 1 + 0) / 4 and found["without_target"] == 2
    assert found["words_per_target"] == (5 + 0 + 1 + 0) / 4
    config, tokenizer = Config(data=DataConfig(train=str(tmp_path / "own.jsonl"))), Tokenizer.load(tokenizer_files)
    kept = [encode_example(e, tokenizer, config, MODEL).target for e in make_task(config.data).examples("train")]
    steps = [int(target.time.max()) + 1 for target in kept]  # the last query of each target
    assert steps == [6, 1, 2, 1] and found["tokens"]["pipelined_steps"]["most"] == max(steps)
    assert found["changed_percent"] == {"sources": 25, "targets": 50, "joined": 0}
    place = f"{tmp_path / 'own.jsonl'}:1"
    assert found["changed_first"] == {
        "sources": f"{place}: '</s>' comes back as ''",
        "targets": f"{place}: '</s>' comes back as ''",
    }
    out = run(capsys, *flags)[1].splitlines()
    row = next(i for i, line in enumerate(out) if line.split()[-3:] == ["sources", "targets", "joined"])
    assert (
        out[row + 1].split()[-3:] == ["25.0", "50.0", "0.0"]
        and out[-1] == f"train, targets: {place}: '</s>' comes back as ''"
    )
    skipped = run(capsys, *flags, "--json", "--set", "data.empty_targets=skip")
    assert json.loads(skipped[1])["splits"]["train"]["examples"] == 2
    assert "2 of 4 training examples have no answer" in skipped[2] and f"{place[:-1]}2" in skipped[2]
    code, _, err = run(capsys, *flags, "--set", "data.empty_targets=refuse")
    assert code == 2 and f"{place[:-1]}2: found no answer (2 of 4 training examples" in err


def test_rows_that_hold_the_separator_are_counted(tmp_path, tokenizer_files, capsys):
    """Joined answers of these examples split into other rows; on the grid rows are not joined."""
    rows = [["the ; baker", "clerk"], ["baker", "clerk"], ["; the", "baker"], ["baker"], ["</s>"], []]
    lines = [{"source": "the baker", "targets": given} for given in rows]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["stats", "jsonl", "--tokenizer", str(tokenizer_files), "--set", f"data.train={tmp_path / 'own.jsonl'}"]
    found = json.loads(run(capsys, *flags, "--json")[1])["splits"]["train"]
    assert found["changed_percent"]["joined"] == pytest.approx(100 * 2 / 6)
    assert found["changed_first"]["joined"] == f"{tmp_path / 'own.jsonl'}:1: 'the ; baker' comes back as 'the'"
    out = run(capsys, *flags)[1].splitlines()
    assert f"train, joined: {tmp_path / 'own.jsonl'}:1: 'the ; baker' comes back as 'the'" in out
    for separator in (" clerk ", " "):
        found = json.loads(run(capsys, *flags, "--json", "--set", f"data.separator={separator}")[1])["splits"]["train"]
        assert found["changed_percent"]["joined"] == pytest.approx(100 * (separator != " ") * 2 / 6)


@pytest.mark.parametrize(
    "flags, words",
    [
        (["prepare", "msqb"], ["TASK: found 'msqb'; expected one of msqa, kp20k"]),
        (["prepare", "demo"], ["TASK: found 'demo'"]),
        (["prepare", "msqa"], ["--manual-dir: found none", "https://multi-span.github.io"]),
        (["prepare", "msqa", "--manual-dir", "{tmp}/no"], ["{tmp}/no: no such directory"]),
        (["prepare"], ["TASK"]),
        ([], ["{{prepare,stats}}"]),
        (["stats", "msqb"], ["TASK: found 'msqb'; expected one of demo, demo_long, jsonl, csv, msqa"]),
        (["stats", "msqa", "--data-dir", "{tmp}"], ["found no msqa/1.0.0 in {tmp}", "prepare msqa"]),
        (
            ["stats", "jsonl"],
            ["found no split of jsonl with examples; expected a file, as in --set data.train=FILE"],
        ),
        (["stats", "demo", "--set", "grid.time=3"], ["grid.time: unknown key (did you mean grid.time_max?)"]),
        (["stats", "demo", "--tokenizer", "{tmp}"], ["{tmp}: found no tokenizer"]),
    ],
)
def test_invalid_commands_are_refused(flags, words, tmp_path, capsys):
    code, out, err = run(capsys, *(flag.format(tmp=tmp_path) for flag in flags))
    last = err.splitlines()[-1]
    assert code == 2 and out == "" and "Traceback" not in err
    assert last.startswith("error: ") and all(word.format(tmp=tmp_path) in last for word in words), last


# Real data: Table 1 of the paper, for the available parts.


def of_table_1(examples):
    found = measure_split(examples, None, DataConfig(), PUBLISHED["msqa"].grid)
    return [round(found[key], 1) for key in ("words_per_target", "rows_per_target", "words_per_row")]


def test_real_msqa_is_read(real_data, tmp_path):
    originals = real_data / "multispanqa" / "original"
    manual = lay(tmp_path / "official", {})
    shutil.copy(originals / "official_valid.json", manual / "valid.json")
    shutil.copy(originals / "official_test.json", manual / "test.json")
    official_test = list(prepared("msqa", manual, tmp_path / "a").examples("test"))
    assert len(official_test) == 653
    assert of_table_1(official_test) == [9.1, 2.9, 3.1]
    found = measure_split(official_test, None, DataConfig(), PUBLISHED["msqa"].grid)
    assert round(found["rows_per_target"], 2) == 2.93 and round(found["words_per_row"], 2) == 3.10
    manual = lay(tmp_path / "own", {})
    shutil.copy(originals / "inhouse_valid.json", manual / "dev.json")
    shutil.copy(originals / "inhouse_test.json", manual / "test.json")
    own = prepared("msqa", manual, tmp_path / "b")
    assert len(own.examples("dev")) == 653
    assert {e.id: e for e in own.examples("test")} == {e.id: e for e in official_test}  # two layouts, one set


def test_real_kp20k_is_read(real_data, tmp_path):
    task = prepared("kp20k", real_data / "kp20k" / "original", tmp_path)
    splits = [task.examples(split) for split in ("train", "dev", "test")]
    assert [len(split) for split in splits] == [991, 1000, 1000]  # nine of the train part are blank
    assert of_table_1([example for split in splits for example in split]) == [10.8, 5.3, 2.0]
    with gzip.open(real_data / "kp20k" / "test.jsonl.gz", "rt", encoding="utf-8") as lines:
        for example, line in zip(splits[2], lines, strict=True):
            record = json.loads(line)
            assert set(example.targets) == {row.replace("<digit>", "#") for row in record["targets"]}
            assert example.source == " ".join(record["source"].replace("<digit>", "#").replace("''", '"').split())


def test_real_kptimes_is_read(real_data, tmp_path):
    originals = real_data / "kptimes" / "original"
    task = prepared("kptimes", originals, tmp_path / "a")
    assert [len(task.examples(split)) for split in ("train", "dev", "test")] == [500, 500, 500]
    assert of_table_1(task.examples("train")) == [10.6, 5.0, 2.1]
    manual = lay(tmp_path / "released", {})
    shutil.copy(originals / "train_sample.jsonl", manual / "train.jsonl")
    released = prepared("kptimes", manual, tmp_path / "b").examples("train")
    assert len(released) == 10
    same = {e.source: e.targets for e in task.examples("train")}  # the sample has the same articles
    assert same[released[1].source] == released[1].targets


def test_other_real_data_sets_are_read(real_data, tmp_path):
    fixtures = real_data / "format_fixtures" / "original"
    sizes = {}
    for name, file in (
        ("wikihow", "wikihow_dummy_all_1.2.0"),
        ("pubmed", "scientific_papers_dummy_pubmed_1.1.1"),
        ("cnn_dailymail", "cnn_dailymail_dummy_3.0.0_3.0.0"),
    ):
        manual = lay(tmp_path / name, {})
        shutil.copy(fixtures / f"{file}.zip", manual)
        task = prepared(name, manual, tmp_path / "data")
        sizes[name] = [len(task.examples(split)) for split in ("train", "dev", "test")]
        assert all(len(e.targets) > 1 for split in ("train", "dev", "test") for e in task.examples(split))
    assert sizes == {"wikihow": [1, 1, 1], "pubmed": [2, 2, 2], "cnn_dailymail": [3, 2, 2]}
