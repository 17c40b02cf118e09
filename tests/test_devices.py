"""Devices: each decodes separately with weights from any mesh, and casts one layer at a time."""

import dataclasses
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax.config import Config, DataConfig, DecodeConfig, GridConfig, MeshConfig, TrainConfig
from pipejax.decoding import Pipelined, Sequential
from pipejax.inference import programs
from pipejax.inference.backends import XLA
from pipejax.inference.generator import Generator
from pipejax.inference.report import Report
from pipejax.model import sharding, t5
from support import oracle
from support.tiny import MODEL

CONFIG = Config(
    model=MODEL,
    grid=GridConfig(delay=1, time_max=12, sub_max=4),
    data=DataConfig(task="none", separator=" "),
    train=TrainConfig(method="pipelined"),
    decode=DecodeConfig(max_length=12),
)
PARAMS = oracle.random_params(MODEL, np.random.default_rng(314))
SOURCES = [np.random.default_rng(i).integers(2, 64, 3 + i % 14).tolist() for i in range(21)]


@pytest.fixture(scope="module")
def alone():
    return Generator(CONFIG, PARAMS, None)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [None, MeshConfig(data=2, fsdp=2, tensor=2)], ids=["one device", "mesh"])
def test_records_are_the_same_on_every_mesh(mesh, alone):
    """Eight devices decode two or more sources each, without communication."""
    params = PARAMS
    if mesh:
        made = sharding.make_mesh(**vars(mesh))
        params = sharding.put_tree(params, sharding.param_shardings(MODEL, params, made))
        assert any(not x.is_fully_replicated for x in jax.tree.leaves(params))
    spread = Generator(CONFIG, params, None, devices=jax.local_devices())
    expected = alone.decode(SOURCES, batch_size=2)
    assert spread.decode(SOURCES, batch_size=2) == expected
    assert len({str(record["row_ids"]) for record in expected}) > 5
    assert {key[2][0] for key in spread.programs._compiled} == {8}
    for program in spread.programs._compiled.values():
        assert not re.search(r"all-(reduce|gather|to-all)|collective|reduce-scatter", program.as_text())


def test_new_weights_compile_nothing(alone):
    """Each evaluation of a training has new weights."""
    found = alone.decode(SOURCES[:2])
    before = dict(alone.programs._compiled)
    other = oracle.random_params(MODEL, np.random.default_rng(1))
    alone.programs.set_params(other)
    changed = alone.decode(SOURCES[:2])
    alone.programs.set_params(PARAMS)
    assert alone.programs._compiled == before and alone.decode(SOURCES[:2]) == found != changed


def test_no_device_holds_two_layers_in_float32():
    """Restored weights are put on the device layer by layer, and are in the compute dtype afterwards."""
    config = dataclasses.replace(MODEL, num_layers=3, num_decoder_layers=3, tied_head=False)
    params = jax.tree.map(lambda x: np.asarray(x, np.float32), oracle.random_params(config, np.random.default_rng(0)))
    before, sent, made = {id(x) for x in jax.live_arrays()}, [], []

    def compute(function, tree, **static):
        assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(tree))
        sent.append(sum(x.nbytes for x in jax.tree.leaves(tree)))
        made.append(jax.jit(function, static_argnames=tuple(static))(tree, **static))
        here = [x for x in jax.live_arrays() if id(x) not in before and x.dtype == jnp.float32]
        assert all(x.ndim == 1 or x.shape[0] == config.num_heads or x.shape[1] == config.num_heads for x in here)
        return made[-1]

    model = t5.T5(config, dtype=jnp.bfloat16)
    ready = XLA.prepare(model, params, compute=compute)
    assert len(sent) == 7 and sum(sent) == sum(x.nbytes for x in jax.tree.leaves(params))
    assert max(sent[:-1]) < sum(sent) / 4
    whole = jax.jit(lambda p: XLA.prepare(model, p))(params)
    assert jax.tree.structure(ready) == jax.tree.structure(whole)
    for a, b in zip(jax.tree.leaves(ready), jax.tree.leaves(whole), strict=True):
        assert a.dtype == b.dtype and (a == b).all()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [Pipelined(1, 2000, 1), Sequential(2000)])
def test_answer_compiles_only_the_cache_sizes_that_it_reaches(strategy, alone):
    """Bounds may be wide: sizes of the cache double up to the bound, and each compiles when it is reached."""
    sizes = programs.schedule(strategy, 1)
    assert sizes.slots[-1] >= strategy.slots and all(b <= 2.8 * a for a, b in itertools.pairwise(sizes.slots))
    fresh, report = programs.Programs(MODEL, jnp.dtype("float32"), devices=jax.local_devices()[:1]), Report()
    fresh.set_params(PARAMS)
    found = fresh.decode(SOURCES[:1], strategy, batch_size=1, across=1, report=report)
    used = {key[1] for key in fresh._compiled if not isinstance(key[0], str)}
    needed = [
        c
        for c in sizes.slots
        if c - strategy.most_queries < int(found.lengths.sum(axis=1).max()) + 2 * strategy.most_queries
    ]
    assert used <= {*sizes.slots[: len(needed) + 1]} and len(used) < len(sizes.slots)


def test_reports_of_processes_add_up():
    """They are exchanged as JSON. The processes ran at the same time, so the seconds of the slowest count."""
    parts = [Report(examples=3, seconds=2.0, steps=9, other_steps=20), Report(examples=2, seconds=5.0, steps=4)]
    parts[0].truncated.update(["sub_max", "sub_max", "time_max"])
    parts[1].truncated.update(["sub_max"])
    sent = [Report(**json.loads(json.dumps(vars(part)))) for part in parts]
    whole = Report.of_all(sent)
    assert (whole.examples, whole.seconds, whole.steps, whole.other_steps) == (5, 5.0, 13, 20)
    assert whole.truncated == {"sub_max": 3, "time_max": 1}
    assert Report.of_all([sent[0], Report(other_steps=None)]).other_steps is None


def test_device_holds_weights_once():
    """The number of decoding devices has no effect: the last chunk may be too small for all of them."""
    spread = programs.Programs(MODEL, jnp.dtype("float32"), devices=jax.local_devices()[:3])
    spread.set_params(PARAMS)
    places = [
        {
            shard.device: shard.data.unsafe_buffer_pointer()
            for x in jax.tree.leaves(spread.on(n))[:1]
            for shard in x.addressable_shards
        }
        for n in (1, 2, 3)
    ]
    assert [len(found) for found in places] == [1, 2, 3]
    for fewer in places[:2]:
        assert fewer.items() <= places[2].items()


@pytest.mark.parametrize("dtype, precise", [("float32", True), ("bfloat16", False)])
def test_float32_is_not_rounded_in_products(dtype, precise):
    """The default of a GPU is TF32. The programs are compiled for this machine, but contain the requested precision."""
    generator = Generator(dataclasses.replace(CONFIG, decode=DecodeConfig(max_length=12, dtype=dtype)), PARAMS, None)
    generator.decode(SOURCES[:1])
    assert len(generator.programs._compiled) == 2
    for program in generator.programs._compiled.values():
        products = [line for line in program.as_text().splitlines() if " dot(" in line]
        assert products and all(("operand_precision={highest,highest}" in line) == precise for line in products)
