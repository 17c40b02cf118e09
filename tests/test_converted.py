"""Opening a Hugging Face model by its place or name: converted once, as `pipejax convert from-hf` does."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipejax
from pipejax.convert import from_hf
from pipejax.convert.huggingface import write_hf
from pipejax.system.errors import UserError
from support import oracle, tiny

PARAMS = oracle.random_params(tiny.MODEL, np.random.default_rng(5))
SOURCES = [[3, 4, 5, 1], [7, 1]]


@pytest.fixture
def there(tokenizer_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face directory, and a cache of this test's own."""
    monkeypatch.setenv("PIPEJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIPEJAX_NATIVE", "off")
    write_hf(tiny.MODEL, PARAMS, tmp_path / "some-t5", tokenizer_files)
    return tmp_path / "some-t5"


def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is converted from now on."""
    made: list[Any] = []

    def count(source: Any, out: Any) -> None:
        made.append(source)
        from_hf(source, out)

    monkeypatch.setattr("pipejax.convert.converted.from_hf", count)
    return made


@pytest.mark.slow
def test_a_directory_is_converted_once(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = conversions(monkeypatch)
    from_hf(there, tmp_path / "run")
    capsys.readouterr()
    records = pipejax.load(there).decode(SOURCES)
    assert f"{there}: converting it once, into {tmp_path}/cache/models/some-t5-" in capsys.readouterr().err
    assert records == pipejax.load(tmp_path / "run").decode(SOURCES) == pipejax.load(there).decode(SOURCES)
    assert made == [there]
    os.utime(there / "config.json", ns=(1, 1))
    pipejax.load(there)
    assert made == [there, there]


def test_a_name_of_the_hub(there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here, asked = list[Path](), list[str]()

    def download(name: str, *, allow_patterns: Any = None, local_files_only: bool = False) -> str:
        if not local_files_only:
            asked.append(name)
            here[:] = [there]
        return str(here[0])

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    made = conversions(monkeypatch)
    t5 = pipejax.load("somebody/some-t5")
    assert t5.config.name == "some-t5" and made == ["somebody/some-t5"]
    asked.clear()
    assert pipejax.load("somebody/some-t5").decode(SOURCES) == t5.decode(SOURCES) and len(made) == 1
    assert not asked, "the kept one is opened without the hub"
    os.utime(there / "config.json", ns=(1, 1))  # as after a download of another version
    pipejax.load("somebody/some-t5")
    assert asked and len(made) == 2


def test_nothing_is_left_of_a_model_that_is_refused(there: Path, tmp_path: Path) -> None:
    (there / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"model.safetensors: found a damaged file"):
        pipejax.load(there)
    assert not [*tmp_path.glob("cache/models/*")]


def test_without_a_cache_it_says_what_to_do(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPEJAX_CACHE", "off")
    with pytest.raises(UserError, match=r"no cache to keep its conversion in; .* pipejax convert from-hf"):
        pipejax.load(there)


def test_a_run_that_is_not_there_is_no_name_of_the_hub(there: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such checkpoint directory"):
        pipejax.load(tmp_path / "runs")
    shutil.rmtree(there)
    (tmp_path / "runs").mkdir()
    with pytest.raises(UserError, match="found no checkpoints/"):
        pipejax.load(tmp_path / "runs")
