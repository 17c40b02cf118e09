"""Opening a checkpoint that an earlier version converted logs possible errors and corrections once."""

import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import pipejax
from pipejax import checkpoint
from pipejax.backbones.t5gemma import GemmaStack, T5GemmaConfig
from pipejax.backbones.t5gemma2 import ARCHITECTURES as T5GEMMAS_2
from pipejax.backbones.t5gemma2 import T5Gemma2Config
from pipejax.backbones.umt5 import ARCHITECTURES as UMT5S
from pipejax.backbones.umt5 import UMT5Config
from pipejax.checkpoint import run as run_module
from pipejax.config import Config, DataConfig, TrainConfig
from pipejax.convert import converted, from_hf, quantize
from pipejax.convert.huggingface import write_hf
from pipejax.model.t5_config import ARCHITECTURES, T5Config
from pipejax.training import loop
from support import tiny
from support.in_transformers import varied

SIZES: dict[str, Any] = {"vocab_size": 64, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_heads": 4}
UMT5 = UMT5Config(**SIZES, num_layers=1, num_decoder_layers=1, feed_forward="gated-gelu", scale_head=False)
SIDE = GemmaStack(16, 24, 4, 2, 6, 6, 4)
PLAIN = dataclasses.replace(SIDE, attn_logit_softcapping=0.0)
T5GEMMA, T5GEMMA2 = T5GemmaConfig(SIDE, SIDE, 50, 3, 3), T5Gemma2Config(PLAIN, PLAIN, 50, 3, 3)
SPARSE = dataclasses.replace(PLAIN, full_every=6)
DOUBTS: list[tuple[Any, str]] = [
    (UMT5, "a head that is the table, not scaled"),
    (dataclasses.replace(UMT5, scale_head=True), ""),
    (dataclasses.replace(UMT5, tied_head=False), ""),
    (UMT5S["umt5-small"], ""),
    (T5Config(**SIZES, num_layers=1, num_decoder_layers=1, scale_head=False), ""),
    (ARCHITECTURES["madlad-3b"], ""),
    (T5GEMMA, ""),
    (
        dataclasses.replace(T5GEMMA, decoder=PLAIN),
        "no decoder.attn_logit_softcapping, which may have been absent in config.json and not null",
    ),
    (
        dataclasses.replace(T5GEMMA, encoder=PLAIN, final_logit_softcapping=0.0),
        "no encoder.attn_logit_softcapping, no final_logit_softcapping, which may have been absent in config.json and "
        "not null",
    ),
    (
        T5GEMMA2,
        "every second layer of the encoder full, as if config.json said so and every second layer of the decoder full, "
        "as if config.json said so",
    ),
    (
        dataclasses.replace(T5GEMMA2, encoder=SPARSE),
        "every second layer of the decoder full, as if config.json said so",
    ),
    (dataclasses.replace(T5GEMMA2, encoder=SPARSE, decoder=SPARSE), ""),
    (dataclasses.replace(T5GEMMA2, num_layers=1, num_decoder_layers=1), ""),
    (
        dataclasses.replace(T5GEMMA2, encoder=dataclasses.replace(SPARSE, full_rope_factor=2.0), decoder=SPARSE),
        "a rope factor of 2 in the encoder, regardless of its type",
    ),
    *((model, "") for model in T5GEMMAS_2.values()),
]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The lines about checkpoints in the log."""
    found, handler = list[str](), logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(run_module.__name__).addHandler(handler)
    run_module._warn_once.cache_clear()
    yield found
    logging.getLogger(run_module.__name__).removeHandler(handler)


def save(place: Path, model: Any, *, objective: str = "none", **given: Any) -> Path:
    config = Config(model=model, data=DataConfig(task="none"), train=TrainConfig(method=objective))
    checkpoint.save_params(place, config, varied(model, 0), **given)
    return place


@pytest.mark.parametrize(("model", "expected"), DOUBTS)
def test_possible_errors_of_earlier_conversions_are_logged(model: Any, expected: str) -> None:
    assert model.earlier_doubts() == expected


@pytest.mark.parametrize("model", [UMT5, dataclasses.replace(T5GEMMA, decoder=PLAIN), T5GEMMA2])
def test_earlier_conversion_message_names_command(model: Any, said: list[str], tmp_path: Path) -> None:
    place = save(tmp_path / "run", model, conversion=None)
    for _ in range(2):
        restored = checkpoint.open_run(place)
        assert restored.config.model == model, "it stays as it is"
    assert said == [
        f"{place}: an earlier version converted it, with {model.earlier_doubts()}; pipejax convert from-hf SOURCE NEW "
        "converts it again"
    ]
    assert "conversion" not in restored.metadata


def test_unaffected_checkpoints_open_silently(said: list[str], tmp_path: Path) -> None:
    checkpoint.open_run(save(tmp_path / "of today", UMT5))
    checkpoint.open_run(save(tmp_path / "right", dataclasses.replace(UMT5, scale_head=True), conversion=None))
    checkpoint.open_run(save(tmp_path / "trained from the start", UMT5, objective="sequential", conversion=None))
    assert not said


def test_new_conversion_stores_its_version(said: list[str], tmp_path: Path) -> None:
    model = dataclasses.replace(T5GEMMA2, encoder=SPARSE)
    write_hf(model, varied(model, 0), tmp_path / "there", None)
    from_hf(tmp_path / "there", tmp_path / "run")
    assert checkpoint.open_run(tmp_path / "run").metadata["conversion"] == checkpoint.CONVERSION
    manifest = json.loads((tmp_path / "run/checkpoints/0/manifest/metadata").read_text())
    assert manifest["metadata"]["conversion"] == checkpoint.CONVERSION and not said


@pytest.mark.parametrize("conversion", [None, checkpoint.CONVERSION])
def test_a_smaller_checkpoint_keeps_the_version(conversion: int | None, said: list[str], tmp_path: Path) -> None:
    place = save(tmp_path / "run", UMT5, conversion=conversion)
    quantize(place, tmp_path / "smaller")
    assert len(said) == (conversion is None)
    assert checkpoint.open_run(tmp_path / "smaller").metadata.get("conversion") == conversion
    assert len(said) == 2 * (conversion is None)


def test_kept_conversion_of_other_version_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there/config.json").write_text("{}")
    before = converted._place(tmp_path, "there", str(tmp_path / "there"))
    monkeypatch.setattr(converted, "CONVERSION", checkpoint.CONVERSION - 1)
    assert before != converted._place(tmp_path, "there", str(tmp_path / "there"))


@pytest.mark.slow
@pytest.mark.parametrize("conversion", [None, checkpoint.CONVERSION])
def test_runs_trained_from_earlier_conversion_are_reported(
    conversion: int | None, said: list[str], tmp_path: Path, tokenizer_files: Path
) -> None:
    """They are reported when they begin, are resumed and are opened. Their heads are not changed."""
    config = Config(model=UMT5, data=DataConfig(task="none"), train=TrainConfig(method="none"))
    place, run = tmp_path / "converted", tmp_path / "run"
    checkpoint.save_params(place, config, varied(UMT5, 0), tokenizer_source=tokenizer_files, conversion=conversion)
    of_run = tiny.change(tiny.RUN_ON_ONE, train={"steps": 2, "init_from": str(place), "checkpoint_every": 1})
    of_run = dataclasses.replace(of_run, model=None)
    loop.fit(of_run, run)
    is_earlier = conversion is None
    begun = f"{place}: an earlier version converted it, with a head that is the table, not scaled; pipejax convert"
    assert [line.startswith(begun) for line in said] == [True] * is_earlier
    said.clear()
    loop.fit(tiny.change(of_run, train={"steps": 3}), run)
    learned = (
        f"{run}: was trained from an earlier version's conversion, with a head that is the table, not scaled; it "
        "keeps these settings"
    )
    assert said == [learned] * is_earlier
    restored = checkpoint.open_run(run)
    assert restored.step == 3 and restored.config.model == UMT5
    assert restored.metadata.get("conversion") == conversion and len(said) == is_earlier


def test_the_version_of_a_conversion_is_a_whole_number(tmp_path: Path) -> None:
    place = save(tmp_path / "run", UMT5)
    with pytest.raises(pipejax.UserError, match=r"conversion as a whole number"):
        manifest = json.loads((place / "checkpoints/0/manifest/metadata").read_text())
        manifest["metadata"]["conversion"] = "two"
        checkpoint.manifest.check_manifest(checkpoint.manifest._seal(manifest), 0, place)


def test_weights_are_not_changed_by_opening(tmp_path: Path) -> None:
    found = checkpoint.open_run(save(tmp_path / "run", UMT5, conversion=None)).items["params"]
    jax.tree.map(np.testing.assert_array_equal, found, varied(UMT5, 0))
