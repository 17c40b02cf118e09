"""Opening a Hugging Face model by its place or name: converted once, as `pipejax convert from-hf` does."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipejax
from pipejax.convert import converted, from_hf
from pipejax.convert.huggingface import write_hf
from pipejax.system.errors import UserError
from support import oracle, tiny

pytestmark = pytest.mark.usefixtures("compiled_once")

PARAMS = oracle.random_params(tiny.MODEL, np.random.default_rng(5))
OTHERS = oracle.random_params(tiny.MODEL, np.random.default_rng(6))
SOURCES = [[3, 4, 5, 1], [7, 1]]


@pytest.fixture
def there(tokenizer_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face directory, and a separate cache for each test."""
    monkeypatch.setenv("PIPEJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIPEJAX_NATIVE", "off")
    write_hf(tiny.MODEL, PARAMS, tmp_path / "some-t5", tokenizer_files)
    return tmp_path / "some-t5"


def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list of all conversions from now on."""
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
    assert f"{there}: converting once into {tmp_path}/cache/models/some-t5-" in capsys.readouterr().err
    assert records == pipejax.load(tmp_path / "run").decode(SOURCES) == pipejax.load(there).decode(SOURCES)
    assert made == [there]
    with kept_time(there / "model.safetensors"):
        write_hf(tiny.MODEL, OTHERS, tmp_path / "others", None)
        shutil.copy(tmp_path / "others/model.safetensors", there)
    from_hf(there, tmp_path / "again")
    assert records != pipejax.load(tmp_path / "again").decode(SOURCES) == pipejax.load(there).decode(SOURCES)
    assert made == [there, there]


def flip(file: Path, place: int = -1) -> None:
    """Changes one bit of a file, but neither its size nor its time."""
    with kept_time(file):
        content = bytearray(file.read_bytes())
        content[place] ^= 1
        file.write_bytes(content)


@contextlib.contextmanager
def kept_time(file: Path) -> Iterator[None]:
    before = file.stat()
    yield
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def shards(directory: Path) -> Path:
    """Moves the weights to a file that an index names."""
    (directory / "model.safetensors").rename(directory / "other.name")
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"x": "other.name"}}')
    return directory / "other.name"


def torchs(directory: Path) -> Path:
    return (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def adapter(directory: Path) -> Path:
    """Writes an adapter of the directory and its base; returns the weights of the base."""
    shutil.copytree(directory, base := directory.with_name("base"))
    (directory / "model.safetensors").rename(directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(f'{{"base_model_name_or_path": "{base}"}}')
    return base / "model.safetensors"


PARTS: dict[str, Callable[[Path], Path]] = {
    "weights": lambda d: d / "model.safetensors",
    "config": lambda d: d / "config.json",
    "generation": lambda d: d / "generation_config.json",
    "tokenizer": lambda d: d / "tokenizer.json",
    "a shard": shards,
    "an index": lambda d: shards(d).with_name("model.safetensors.index.json"),
    "torch": torchs,
    "an adapter": lambda d: adapter(d).parents[1] / d.name / "adapter_model.safetensors",
    "an adapter's settings": lambda d: adapter(d).parents[1] / d.name / "adapter_config.json",
    "an adapter's base": adapter,
}


@pytest.mark.parametrize("part", PARTS)
def test_one_bit_of_any_file_makes_another_conversion(part: str, there: Path) -> None:
    changed = PARTS[part](there)
    before = place_of(there)
    os.utime(changed, ns=(1, 1))
    (there / "README.md").write_text("read by nobody")
    assert place_of(there) == before, "neither time nor other files count"
    if changed.name in ("adapter_config.json", "model.safetensors.index.json"):  # these files must remain JSON
        changed.write_text(changed.read_text().replace(": ", " :"))
    else:
        flip(changed)
    assert place_of(there) != before


def place_of(directory: Path, name: str = "name") -> Path:
    return converted._place(Path("cache"), name, str(directory))


def test_conversion_depends_on_files_name_and_version(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = place_of(there)
    assert place_of(there, "other").name == before.name.replace("name", "other")
    shutil.copytree(there, tmp_path / "copy")
    assert place_of(tmp_path / "copy") == before, "where a directory lies changes no answer"
    monkeypatch.setattr(converted, "VERSION", "0.0.9")
    assert place_of(there) not in (before, place_of(there, "other"))
    monkeypatch.undo()
    (tmp_path / "copy/generation_config.json").rename(tmp_path / "copy/pipejax.json")
    assert place_of(tmp_path / "copy") != before, "by another name the same content is read for something else"
    monkeypatch.setattr(converted, "PIECE", 16)
    file, content = tmp_path / "file", bytes(range(40))
    digests = set()
    for start in (content, content[16:32] + content[:16] + content[32:], content[:-1], content[:32]):
        file.write_bytes(start)
        digests.add(converted._digest_of_content(file))
    assert len(digests) == 4


def test_blob_of_the_hub_is_identified_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds only within the hub's cache, since other directories may have similar links."""
    blob = tmp_path / "hub/models--a--b/blobs" / ("5" * 64)
    blob.parent.mkdir(parents=True)
    blob.write_bytes(b"content")
    (tmp_path / "model.safetensors").symlink_to(blob)
    other = converted._digest_of_content(tmp_path / "model.safetensors")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert converted._digest_of_content(tmp_path / "model.safetensors") == "5" * 64 != other
    short = blob.rename(blob.with_name("5" * 40))
    assert converted._digest_of_content(short) == other


def test_model_of_the_hub_is_opened_by_name(there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    flip(there / "model.safetensors")  # as after a download of another version
    pipejax.load("somebody/some-t5")
    assert asked and len(made) == 2


def test_refused_model_leaves_no_files(there: Path, tmp_path: Path) -> None:
    (there / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"model.safetensors: found a damaged file"):
        pipejax.load(there)
    assert not [*tmp_path.glob("cache/models/*")]


def test_without_a_cache_the_message_recommends_convert(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPEJAX_CACHE", "off")
    with pytest.raises(UserError, match=r"no cache for its conversion; .* pipejax convert from-hf"):
        pipejax.load(there)


def test_absent_run_is_not_looked_up_on_the_hub(there: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such checkpoint directory"):
        pipejax.load(tmp_path / "runs")
    shutil.rmtree(there)
    (tmp_path / "runs").mkdir()
    with pytest.raises(UserError, match="found no checkpoints/"):
        pipejax.load(tmp_path / "runs")


def test_an_incomplete_download_is_completed(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing shard of the index is downloaded, and the directory is not reported as damaged."""
    part = there.parent / "part"
    shutil.copytree(there, part)
    (part / "model.safetensors").unlink()
    (part / "model.safetensors.index.json").write_text('{"weight_map": {"shared.weight": "model-1-of-1.safetensors"}}')
    calls: list[object] = []

    def locate(source: object, *, at_once: bool = False) -> Path:
        if at_once:
            return part
        calls.append(source)
        return there

    def convert(source: object, out: Path) -> None:
        calls.append(source)
        out.mkdir()

    monkeypatch.setattr(converted, "locate", locate)
    monkeypatch.setattr(converted, "from_hf", convert)
    converted.find_checkpoint("some/t5")
    assert calls == ["some/t5", "some/t5"]


@pytest.mark.parametrize("of_hub", [True, False])
def test_base_of_an_adapter_is_downloaded_at_most_once(
    there: Path, monkeypatch: pytest.MonkeyPatch, of_hub: bool
) -> None:
    """It is not downloaded if the last download is converted, and once if the hub has a newer one."""
    base = adapter(there).parent
    (there / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    at, asked = {"some/base": base, "some/adapter": there}, list[str]()

    def download(name: str, *, allow_patterns: Any = None, local_files_only: bool = False) -> str:
        if not local_files_only:
            asked.append(name)
        return str(at[name])

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr(converted, "from_hf", lambda source, out: out.mkdir())
    source = "some/adapter" if of_hub else str(there)
    names = ["some/adapter", "some/base"] if of_hub else ["some/base"]
    first = converted.find_checkpoint(source)
    assert asked == names
    assert converted.find_checkpoint(source) == first and asked == names
    flip(base / "model.safetensors")
    assert converted.find_checkpoint(source) != first and asked == 2 * names


def test_conversion_has_the_name_of_the_link(there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link's name is used, as in caches and servers; the target's name only if the system resolves the link."""
    (tmp_path / "latest").symlink_to(there)
    (there / "in").mkdir()
    (tmp_path / "deep").symlink_to(there / "in")
    monkeypatch.chdir(tmp_path)
    for spelling, name in (("latest", "latest"), ("deep/..", "some-t5"), ("./some-t5/.", "some-t5")):
        run = tmp_path / f"run of {name}{len(spelling)}"
        from_hf(spelling, run)
        assert json.loads((run / "config.json").read_text())["name"] == name
        assert converted.find_checkpoint(spelling).parent.name.rpartition("-")[0] == name
