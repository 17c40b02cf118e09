"""Exported programs write the records of decoding, in a process with only JAX and NumPy."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax import export as jax_export

import pipejax
from pipejax import checkpoint
from pipejax.apps.export.export_command import main
from pipejax.inference import programs
from pipejax.system.errors import UserError
from support import oracle, tiny
from support.refusals import refuses

flatbuffers = pytest.importorskip("flatbuffers")

ROOT = Path(__file__).parents[1]
BATCH, LENGTH = 2, 16
ABSENT = ("pipejax", "flax", "transformers", "tokenizers", "orbax", "safetensors")
Answer = tuple[list[list[int]], int, str | None]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("export") / "run"
    params = oracle.random_params(tiny.MODEL, np.random.default_rng(7), eos_scale=1.5)
    checkpoint.save_params(directory, tiny.change(tiny.RUN, train={"method": "pipelined"}), params)
    return directory


@pytest.fixture(autouse=True)
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables the kernel, which needs a C++ compilation, and rounds activations for narrow weights."""
    monkeypatch.setenv("PIPEJAX_NATIVE", "off")


def sources(count: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    lengths = [1, LENGTH - 1, *rng.integers(1, LENGTH, count - 2)]
    return [[*rng.integers(2, tiny.MODEL.vocab_size, n).tolist(), tiny.MODEL.eos_token_id] for n in lengths]


def run(trained: Path, out: Path, *flags: str, settings: Sequence[str] = ()) -> None:
    shape = ("--batch", str(BATCH), "--source", str(LENGTH))
    assignments = [part for setting in settings for part in ("--set", setting)]
    assert main(["--checkpoint", str(trained), str(out), *shape, *flags, *assignments]) == 0


def loader(out: Path, method: str, *, records: bool = False) -> str:
    """The code of the page with the names of this export; `records`: with the code that makes ids from records."""
    page = (ROOT / "docs" / "export.md").read_text()
    code = "".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[: 1 + records])
    return code.replace("exported/sequential", f"exported/{method}").replace("exported/", f"{out}/")


def answers(decode: Callable[[Any], Any], out: Path, given: list[list[int]]) -> list[Answer]:
    names = json.loads((out / "export.json").read_text())["truncated"]
    found: list[Answer] = []
    for first in range(0, len(given), BATCH):
        part = given[first : first + BATCH]
        got = decode(part)
        for b in range(len(part)):
            rows = [row[:n] for row, n in zip(got["tokens"][b], got["lengths"][b], strict=True) if n]
            found.append(([list(map(int, row)) for row in rows], int(got["steps"][b]), names[got["truncated"][b]]))
    return found


def expected(trained: Path, method: str, given: list[Any], settings: Sequence[str] = ()) -> list[Answer]:
    records = pipejax.load(trained, overrides=settings).decode(given, method=method, batch_size=BATCH)
    return [([row for row in r["row_ids"] if row], r["steps"], r["truncated"]) for r in records]


def following(printed: Iterator[Any], part: list[list[int]]) -> Any:
    return next(printed)


@pytest.mark.slow
def test_both_methods_without_the_libraries(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, given = tmp_path / "out", sources(8)
    with monkeypatch.context() as patch:
        patch.setattr(programs, "SLOTS", (12,))  # most answers need a larger cache
        run(trained, out, "--method", "pipelined", "--method", "sequential")
    for method in ("pipelined", "sequential"):
        code = f"import sys; sys.modules.update(dict.fromkeys({ABSENT}))\n{loader(out, method)}"
        code += "import json\nfor part in json.load(sys.stdin):\n"
        code += "    print(json.dumps({name: x.tolist() for name, x in decode(part).items()}))\n"
        parts = [given[i : i + BATCH] for i in range(0, len(given), BATCH)]
        ended = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            input=json.dumps(parts),
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        printed = map(json.loads, ended.stdout.splitlines())
        found = answers(partial(following, printed), out, given)
        wanted = expected(trained, method, given)
        assert found == wanted
        assert len({sum(map(len, rows)) for rows, _, _ in wanted}) > 2, "answers of a few lengths"


def decoder(out: Path, method: str) -> Callable[[Any], Any]:
    names: dict[str, Any] = {}
    exec(loader(out, method), names)
    found: Callable[[Any], Any] = names["decode"]
    return found


@pytest.mark.parametrize(
    "method, settings",
    [
        pytest.param("pipelined", ["decode.weights=int8"], marks=pytest.mark.slow),
        pytest.param("sequential", ["decode.weights=bfloat16"], marks=pytest.mark.long),
        pytest.param("pipelined", ["grid.sub_max=9"], marks=pytest.mark.long),  # steps of several sizes
        pytest.param("pipelined", ["decode.draft=source"], marks=pytest.mark.long),
        pytest.param("sequential", ["decode.draft=source"], marks=pytest.mark.long),
        pytest.param("sequential", ["decode.beams=3"], marks=pytest.mark.slow),
    ],
)
def test_exported_answers_equal_decode_with_the_same_settings(
    trained: Path, tmp_path: Path, method: str, settings: list[str]
) -> None:
    out, given = tmp_path / "out", sources(8)
    run(trained, out, "--method", method, settings=settings)
    assert answers(decoder(out, method), out, given) == expected(trained, method, given, settings)


def test_description_and_platforms_are_exported(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(trained, out, "--platforms", "cuda,tpu", settings=["grid.time_max=9"])
    facts = json.loads((out / "export.json").read_text())
    assert {path.name for path in out.iterdir()} == {*facts["programs"], "weights.npz", "export.json"}
    assert set(facts["programs"]) == {"pipelined-cuda.jax", "pipelined-tpu.jax"}
    for name, of in facts["programs"].items():
        program = jax_export.deserialize(bytearray((out / name).read_bytes()))
        assert program.platforms == (of["platform"],)
        assert [str(x) for x in program.in_avals[-2:]] == [f"int32[{BATCH},{LENGTH}]", f"int32[{BATCH}]"]
        assert of["outputs"] == {name: str(x) for name, x in zip(sorted(of["outputs"]), program.out_avals, strict=True)}
        assert of["outputs"]["lengths"] == f"int32[{BATCH},{tiny.RUN.grid.sub_max}]"
    assert facts["dtype"] == "bfloat16" and facts["grid"]["time_max"] == 9
    assert facts["template"] == "{source}" and facts["fields"] == ["source"]  # the template of the embedded task
    assert (
        facts["eos"] == tiny.MODEL.eos_token_id
        and facts["ends"] == [facts["eos"]]
        and facts["architecture"]["vocab_size"] == tiny.MODEL.vocab_size
    )
    assert facts["checkpoint"]["params_fp"] == pipejax.load(trained).origin["params_fp"]
    table = tiny.MODEL.vocab_size, tiny.MODEL.d_model
    with np.load(out / "weights.npz") as arrays:
        assert [arrays[name].shape for name in arrays].count(table) == 1, "encoder, decoder and head share it"


@pytest.mark.slow
@pytest.mark.parametrize(
    "data, template, records",
    [
        (
            {"task": "csv", "rows": "delimiter", "source_template": "{title} near {{the}} {text} . {title}"},
            None,
            [{"title": "baker", "text": "river"}, {"title": None, "text": "bread"}, {"text": "bread " * 20}],
        ),
        ({"task": "csv", "rows": "delimiter"}, "{source}", [{"source": "the baker {sang}"}]),
        ({"task": "msqa"}, "Question: {question} Context: {context}", [{"question": "baker", "context": "the river"}]),
        ({"task": "none"}, "{source}", [{"source": "the baker"}, {"source": "bread " * 30}]),
    ],
)
def test_the_template_makes_the_ids_of_decode(
    tmp_path: Path, tokenizer_files: Path, data: dict[str, Any], template: str | None, records: list[dict[str, Any]]
) -> None:
    config = tiny.change(tiny.RUN, data={"max_source": LENGTH, **data}, grid={"time_max": 3, "sub_max": 1})
    params = oracle.random_params(tiny.MODEL, np.random.default_rng(7), eos_scale=1.5)
    checkpoint.save_params(tmp_path / "run", config, params, tokenizer_source=tokenizer_files)
    out = tmp_path / "out"
    run(tmp_path / "run", out)
    facts = json.loads((out / "export.json").read_text())
    assert facts["template"] == (template or data["source_template"])
    assert facts["fields"] == list(dict.fromkeys(re.findall(r"(?<!{){(\w+)}(?!})", facts["template"])))
    names: dict[str, Any] = {}
    exec(loader(out, "pipelined", records=True), names)
    made = pipejax.load(tmp_path / "run")
    for record in records:
        ids = names["ids_of"](record)
        assert ids == list(made.ids_of(made.source(record, "a record", 0))) and len(ids) <= LENGTH
    found = answers(names["decode"], out, [names["ids_of"](record) for record in records])
    assert found == expected(tmp_path / "run", "pipelined", records)


@pytest.mark.parametrize(
    "flags, line",
    [
        (["--platforms", "cpu,gpu"], "--platforms: found 'gpu'; expected some of cpu,cuda,tpu"),
        (["--batch", "0"], "--batch: found 0; expected at least 1"),
        (["--source", "1"], "--source: found 1; expected at least 2"),
        (
            ["--set", "data.task=demo"],
            "--set: data.task cannot be changed in an export; expected one of grid, decode, method",
        ),
        (["--set", "grid.delay=-1"], "grid.delay: found -1; expected at least 0"),
        (["--method", "pipelined", "--set", "decode.beams=2"], "decode.beams: found 2; expected 1, since beam"),
        (["--set", "decode.temperature=0.5"], "decode.temperature: found 0.5; expected 0.0"),
        (["--set", "decode.unique_rows=true"], "decode.unique_rows: found True; expected False"),
        (["--best"], "found no best/; expected a run that was evaluated at least once"),
    ],
)
def test_refused_export_raises_one_line_and_leaves_no_files(
    trained: Path, tmp_path: Path, flags: list[str], line: str
) -> None:
    with pytest.raises(UserError) as refused:
        main(["--checkpoint", str(trained), str(tmp_path / "out"), *flags])
    assert line in str(refused.value) and "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_missing_flatbuffers_raises_one_line_with_the_extra(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    with pytest.raises(
        UserError, match=r"^export: found no flatbuffers; expected the packages of the extra pipejax\[export\]"
    ):
        run(trained, tmp_path / "out")


def test_existing_directory_is_not_overwritten(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with refuses(tmp_path):
        main(["--checkpoint", str(trained), str(tmp_path)])
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_an_export_that_fails_leaves_nothing(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **arrays: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space left"):
        run(trained, tmp_path / "above" / "out", settings=["grid.time_max=3", "grid.sub_max=1"])
    assert not list(tmp_path.iterdir())
