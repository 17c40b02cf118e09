"""Sealed manifests with false entries are refused in a line that names the key, before any array is built."""

import dataclasses
import json
import re
import shutil

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from lab.faults import forged, runs
from pipejax import checkpoint
from pipejax import config as config_lib
from pipejax.config import Config, DataConfig, T5Config, TrainConfig
from pipejax.convert import huggingface
from pipejax.inference.loading import load
from pipejax.model import parameters
from pipejax.system.errors import UserError
from pipejax.training import loop
from support import oracle

# The model of `lab.faults`, whose forgeries name these sizes.
MODEL = T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=24, num_heads=4, num_layers=1, num_decoder_layers=1)


@pytest.fixture(scope="module")
def run(tmp_path_factory, tokenizer_files):
    """A run directory with a step 4."""
    here = tmp_path_factory.mktemp("forged")
    shutil.copytree(tokenizer_files, here / "run/tokenizer")
    config = Config(model=MODEL, data=DataConfig(task="none", separator=" "), train=TrainConfig(method="none"))
    store = checkpoint.Store(here / "run/checkpoints", writable=True)
    params = oracle.random_params(MODEL, np.random.default_rng(0))
    assert store.save(4, {"params": params}, config=config, wait=True) and store.close()
    return here


def test_forged_seals_equal_those_of_pipejax(run):
    forged._forge(run, lambda body: None)
    assert load(run / "run").origin["step"] == 4


@pytest.mark.parametrize("kind", forged.KINDS, ids=lambda kind: kind.name[:70])
def test_forged_manifest_is_refused(kind, run, monkeypatch):
    monkeypatch.setattr("pipejax.inference.generator.Generator", lambda *_, **__: pytest.fail("something was built"))
    (manifest,) = (run / forged.STEP / "manifest").glob("metadata")
    good = manifest.read_bytes()
    try:
        kind.spoil(run)
        with pytest.raises(UserError) as caught:
            load(run / "run")
    finally:
        manifest.write_bytes(good)
    assert all(word in str(caught.value) for word in kind.words) and "\n" not in str(caught.value), caught.value


@pytest.mark.parametrize("changes", [{}, {"feed_forward": "gated-gelu"}, {"tied_head": False, "num_layers": 3}])
def test_parameter_table_equals_parameters_of_the_module(changes):
    """The table of parameters for checks equals the parameters of the modules."""
    model = dataclasses.replace(MODEL, **changes)
    built = flatten_dict(jax.eval_shape(lambda key: model.init_params(key), jax.random.key(0)), sep="/")
    parameters.check_paths("here", {path: x.shape for path, x in built.items()}, model)
    path = sorted(built)[3]
    with pytest.raises(UserError, match=f"^here: {path}: missing"):
        parameters.check_paths("here", {p: x.shape for p, x in built.items() if p != path}, model)
    with pytest.raises(UserError, match=f"^here: {path}: found shape"):
        parameters.check_paths("here", {p: (7,) if p == path else x.shape for p, x in built.items()}, model)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of one step, and its config."""
    here = tmp_path_factory.mktemp("trained")
    config = config_lib.load(runs.prepare(here), ["train.steps=1", "data.dev="])
    assert loop.fit(config, here / "run") == 0
    return here / "run", config


@pytest.mark.slow
@pytest.mark.parametrize("what", ["decode", "resume", "start from", "convert"])
def test_tokenizer_of_another_run_is_refused(what, trained, tmp_path):
    """Without this refusal, other ids would be read and written silently."""
    run, config = tmp_path / "run", trained[1]
    shutil.copytree(trained[0], run)
    file = run / "tokenizer/tokenizer.json"
    text = file.read_text()
    assert text.count("honey") > 0
    file.write_text(text.replace("honey", "money"))

    def use():
        if what == "decode":
            load(run)
        elif what == "resume":
            loop.fit(config_lib.override(config, ["train.steps=2"]), run)
        elif what == "start from":
            new = config_lib.override(config, [f"train.init_from={run}", "data.tokenizer="])
            loop.fit(dataclasses.replace(new, model=None), tmp_path / "new")
        else:
            huggingface.to_hf(run, tmp_path / "hf")

    with pytest.raises(UserError, match=rf"^{re.escape(str(file))}: found other content; expected what was saved"):
        use()
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["1"]
    file.write_text(text)
    if what != "resume":  # the right tokenizer is accepted; another test resumes with it
        use()


def test_checkpoint_without_tokenizer_fingerprint_opens(trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained[0], run)
    (manifest,) = (run / "checkpoints/1/manifest").glob("metadata")
    body = json.loads(manifest.read_text())
    assert body["metadata"].pop("tokenizer").keys() == {path.name for path in (run / "tokenizer").iterdir()}
    assert body.pop("settings")["jax_default_prng_impl"] == "threefry2x32"
    manifest.write_text(json.dumps(forged.seal(body)))
    assert load(run).tokenizer is not None
