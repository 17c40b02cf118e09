"""Sealed manifests that say what is not so: refused in a line that names the key, before anything is built."""

import numpy as np
import oracle
import pytest

from experiments.faults import forged
from pipejax import checkpoint, generate, parameters, t5
from pipejax.config import Config, DataConfig, T5Config, TrainConfig
from pipejax.data import demo
from pipejax.errors import UserError

# The harness's model: its forgeries name the sizes.
MODEL = T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=24, num_heads=4, num_layers=1, num_decoder_layers=1)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory with a step 4."""
    here = tmp_path_factory.mktemp("forged")
    demo.build_tokenizer(here / "run/tokenizer")
    config = Config(model=MODEL, data=DataConfig(task="none", separator=" "), train=TrainConfig(objective="none"))
    store = checkpoint.Store(here / "run/checkpoints", writable=True)
    params = oracle.random_params(MODEL, np.random.default_rng(0))
    assert store.save(4, {"params": params}, config=config, wait=True) and store.close()
    return here


def test_the_forger_seals_as_the_program_does(run):
    forged._forge(run, lambda body: None)
    assert generate.load(run / "run", log=str).origin["step"] == 4


@pytest.mark.parametrize("kind", forged.KINDS, ids=lambda kind: kind.name[:70])
def test_refused(kind, run, monkeypatch):
    monkeypatch.setattr(generate, "Generator", lambda *_, **__: pytest.fail("something was built"))
    (manifest,) = (run / forged.STEP / "manifest").glob("metadata")
    good = manifest.read_bytes()
    try:
        kind.spoil(run)
        with pytest.raises(UserError) as caught:
            generate.load(run / "run", log=str)
    finally:
        manifest.write_bytes(good)
    assert all(word in str(caught.value) for word in kind.words) and "\n" not in str(caught.value), caught.value


@pytest.mark.parametrize("changes", [{}, {"feed_forward": "gated-gelu"}, {"tied_head": False, "num_layers": 3}])
def test_the_table_of_parameters_is_what_the_model_has(changes):
    """The table that is checked against, and the modules that are built."""
    import dataclasses

    import jax
    from flax.traverse_util import flatten_dict

    model = dataclasses.replace(MODEL, **changes)
    built = flatten_dict(jax.eval_shape(lambda key: t5.init_params(model, key), jax.random.key(0)), sep="/")
    parameters.check_paths("here", {path: x.shape for path, x in built.items()}, model)
    path = sorted(built)[3]
    with pytest.raises(UserError, match=f"^here: {path}: missing"):
        parameters.check_paths("here", {p: x.shape for p, x in built.items() if p != path}, model)
    with pytest.raises(UserError, match=f"^here: {path}: found shape"):
        parameters.check_paths("here", {p: (7,) if p == path else x.shape for p, x in built.items()}, model)
