"""The CPU kernel's products in layers of any backbone: NumPy's products, and the steps that XLA computes."""

import dataclasses
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from pipejax.backbones import t5gemma
from pipejax.backbones.t5gemma import GemmaStack, T5GemmaConfig
from pipejax.backbones.t5gemma2 import T5Gemma2Config
from pipejax.backbones.umt5 import UMT5Config
from pipejax.decoding import GREEDILY, DecodingOptions, Pipelined
from pipejax.decoding.choice import first_argmax
from pipejax.inference import backends
from pipejax.inference.backends import Backend
from pipejax.inference.programs import Programs
from pipejax.inference.report import Report
from pipejax.kernels import backends as kernel_backends
from pipejax.kernels import cpu_kernel, products
from pipejax.kernels.backends import OwnKernel, Products
from pipejax.kernels.cpu_decoder import matrix
from pipejax.model import layers, t5
from pipejax.model.backbone import smallest_batch
from pipejax.model.quantization import quantize
from pipejax.model.t5_config import T5Config
from support.in_transformers import varied
from support.kernel_models import WEIGHTS, in_one_digit

SIDE = GemmaStack(32, 48, 4, 2, 8, 8, sliding_window=3, attn_logit_softcapping=2.0)
GEMMA = T5GemmaConfig(SIDE, dataclasses.replace(SIDE, hidden_size=16), 50, 2, 2, final_logit_softcapping=4.0)
BACKBONES = {
    "t5gemma": GEMMA,
    "untied": dataclasses.replace(GEMMA, tied_head=False),
    "t5gemma2": T5Gemma2Config(SIDE, SIDE, 50, 2, 2),
    "umt5": UMT5Config(50, 16, 8, 32, 2, 2, 2, feed_forward="gated-gelu", tied_head=False, scale_head=False),
}
# Relative to the largest number, as in test_kernels: for two digits or float32, and for one digit.
NEAR, OFF = {"auto": 3e-5, "bfloat16": 3e-4, "int8": 3e-4}, 0.02
GEMMAS = "t5gemma", "untied", "t5gemma2"
SOURCES = [[7, 3, 9, 4, 5, 1], [8, 1], [6, 6, 2, 1]]
GRID = Pipelined(1, 12, 4)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("outputs, inputs, columns", [(16, 16, 1), (50, 32, 3), (7, 48, 10)])
def test_products_equal_numpy(outputs, inputs, columns, weights, kernel):
    rng = np.random.default_rng(outputs)
    rows = rng.standard_normal((outputs, inputs)).astype(np.float32)
    x = rng.standard_normal((2, columns, inputs)).astype(np.float32)
    by = products.Panels(matrix({"embedding": jnp.asarray(rows)}, weights=weights), outputs)
    held = rows
    if weights == "bfloat16":
        held = np.asarray(jnp.asarray(rows).astype(jnp.bfloat16), np.float32)
    if weights == "int8":
        whole, scale = map(np.asarray, quantize(jnp.asarray(rows), axis=1))
        held = whole * scale[:, None]
    wanted = x.astype(np.float64) @ held.T.astype(np.float64)
    for finer in (False, True):
        found = jax.jit(partial(products._multiply, level=kernel, finer=finer))(x, by)
        assert found.shape == wanted.shape and found.dtype == jnp.float32
        near = OFF if in_one_digit(weights, kernel) and not finer else NEAR[weights]
        assert np.abs(found - wanted).max() <= near * np.abs(wanted).max()


def table_and_columns(kind, count):
    """A table f32 [V, D] and columns f32 [N, D]."""
    rng = np.random.default_rng(count)
    rows, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((5003, 64), (count, 64)))
    if kind == "equal rows":
        rows[2500:] = rows[: len(rows) - 2500]
    if kind == "nearly equal rows":
        rows = rows[:1] * (1 + 1e-6 * rows)
    if kind == "below zero":
        rows, x = -np.abs(rows), np.abs(x)
    if kind == "a large number in each row":
        rows[:, 5] *= 300
    if kind == "large columns":
        x *= 1000
    if kind == "zeros":
        x[:] = 0
    if kind == "no numbers":
        x[-1, 3], rows[7, 2], rows[9, 4] = np.nan, np.inf, -np.inf
    return rows, x


@pytest.mark.parametrize("cap", [0.0, 4.0, 30.0])
@pytest.mark.parametrize(
    "kind",
    [
        "random",
        "equal rows",
        "nearly equal rows",
        "below zero",
        "a large number in each row",
        "large columns",
        "zeros",
        "no numbers",
    ],
)
def test_highest_logit_is_found_by_bounds(kind, cap, kernel):
    for count in (1, 3, 8):
        rows, x = table_and_columns(kind, count)
        part = {"embedding": jnp.asarray(rows)}
        by, rough = products.Panels(matrix(part, weights="auto"), len(rows)), products.roughen(part)
        found = np.asarray(jax.jit(partial(products._peaks, cap=cap, level=kernel))(x, by, rough))
        whole = np.asarray(jax.jit(partial(products._multiply, level=kernel, finer=True))(x, by))
        chosen, wanted = (first_argmax(t5gemma.cap(jnp.asarray(each), cap).T) for each in (found, whole))
        np.testing.assert_array_equal(chosen, wanted)
        if kind == "no numbers":
            continue
        assert (found >= whole).all() and found.shape == (count, len(rows))
        if kind == "random" and cap != 4:  # the cap changes most of these
            np.testing.assert_array_equal(chosen, (x.astype(np.float64) @ rows.T.astype(np.float64)).argmax(axis=1))
            assert 0 < (found == whole).mean() < 0.5


SIZES = {  # factors of random rows and hidden states, and the change of every third row
    "tiny rows": (1e-18, 1.0, None),
    "tiny rows and hidden states": (1e-12, 1e-13, None),
    "denormal rows": (1e-40, 1.0, None),
    "denormal rows, huge hidden states": (1e-40, 1e20, None),
    "huge rows": (1e30, 1.0, None),
    "products overflow": (1e25, 1e15, None),
    "tiny hidden states": (1.0, 1e-30, None),
    "denormal hidden states": (1.0, 1e-41, None),
    "huge hidden states": (0.01, 1e37, None),
    "huge hidden states, zero rows": (0.01, 1e37, 0.0),
    "zero rows": (1.0, 1.0, 0.0),
    "zero rows among tiny rows": (1e-20, 1.0, 0.0),
    "denormal rows among others": (1.0, 1.0, 1e-41),
    "tiny rows among others": (1.0, 1.0, 1e-18),
    "huge rows among others": (1.0, 1e-5, 1e30),
    "rows that are no numbers": (1.0, 1.0, np.nan),
    "infinite rows": (1.0, 1.0, np.inf),
    "infinite rows, zero hidden states": (1.0, 0.0, np.inf),
    "hidden states that are no numbers": (1.0, np.nan, None),
    "infinite hidden states": (1.0, np.inf, 0.0),
}


@pytest.fixture(scope="module")
def by_bounds_and_by_products(kernel):
    """The highest row of a table [V, D] for columns [N, D], by bounds and by all products; and both [N, V]."""

    @jax.jit
    def compute(rows, x):
        by = products.Panels(matrix({"embedding": rows}, weights="auto"), len(rows))
        rough = products.roughen({"embedding": rows})
        both = products._peaks(x, by, rough, cap=0.0, level=kernel), products._multiply(x, by, level=kernel, finer=True)
        return [first_argmax(each.T) for each in both], both

    return lambda rows, x: jax.device_get(compute(rows, x))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", SIZES)
@np.errstate(all="ignore")
def test_bounds_hold_for_numbers_of_any_size(name, sign, by_bounds_and_by_products):
    of_rows, of_columns, third = SIZES[name]
    rng = np.random.default_rng(5)
    rows, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((1003, 64), (4, 64)))
    rows, x = sign * np.abs(rows) * np.float32(of_rows), np.abs(x) * np.float32(of_columns)
    rows[500:600] = rows[100:200]
    if third is not None:
        rows[::3] *= np.float32(third)
    (found, wanted), (bounds, whole) = by_bounds_and_by_products(rows, x)
    np.testing.assert_array_equal(found, wanted)
    assert (np.isnan(whole) | (bounds >= whole)).all()
    exact = x.astype(np.float64) @ rows.T.astype(np.float64)
    if np.isfinite(whole).all() and "denormal" not in name:  # numbers that a processor may treat as zeros
        most, chosen = exact.max(axis=1), np.take_along_axis(exact, found[:, None], 1)[:, 0]
        assert (chosen >= most - 1e-5 * np.abs(most) - 1e-36).all()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_bounds_hold_for_tables_of_rows_of_all_sizes(seed, by_bounds_and_by_products):
    rng = np.random.default_rng(seed)
    for _ in range(10):
        rows, x = (rng.standard_normal(shape) for shape in ((1003, 64), (4, 64)))
        rows *= 10 ** rng.uniform(*sorted(rng.uniform(-46, 38, 2)), (1003, 1))
        x *= 10 ** rng.uniform(-46, 37, (4, 1))
        rows[rng.choice(1003, 50)] = rows[rng.choice(1003, 50)]  # the lowest index of equal logits
        with np.errstate(all="ignore"):
            given = rows.astype(np.float32), x.astype(np.float32)
        (found, wanted), (bounds, whole) = by_bounds_and_by_products(*given)
        np.testing.assert_array_equal(found, wanted)
        assert (np.isnan(whole) | (bounds >= whole)).all()


def test_bounds_include_rounding_errors_tightly(by_bounds_and_by_products):
    """Rounding separates the sums of a row and of the same row in int8 as far as possible.

    The row is exact in int8: 127 and many ones, with a scale slightly above 1. In the sum of whole numbers each small
    number is slightly less than half of the last place, and is lost. In the other sum it is slightly more.
    """
    rows, x = np.ones((64, 256), np.float32), np.full(256, 2.0**-17 * (1 - 2.0**-18), np.float32)
    rows[:, 0], x[0] = 127, 130 / 127
    rows *= np.float32(1 + 2.0**-16)
    rows[40] *= 2  # in another panel, so that the bounds of the other rows are not products
    _, (bounds, whole) = by_bounds_and_by_products(rows, x[None])
    rough = np.float32(127) * x[0] * np.float32(1 + 2.0**-16)
    assert whole[0, 0] <= bounds[0, 0] and whole[0, 0] > rough + 0.9 * (bounds[0, 0] - rough)


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow) if x != "t5gemma" else x for x in GEMMAS])
def test_answers_by_bounds_equal_answers_by_all_products(name, kernel, monkeypatch):
    params, asked = varied(BACKBONES[name], 2, centered=True), []
    plain = decoded(BACKBONES[name], params, Products("auto", kernel))
    peaks = products._peaks
    monkeypatch.setattr(products, "MANY", 1)
    monkeypatch.setattr(products, "FEW", 12)
    monkeypatch.setattr(products, "_peaks", lambda *given, **more: asked.append(given) or peaks(*given, **more))
    found = decoded(BACKBONES[name], params, Products("auto", kernel))
    assert (found.tokens == plain.tokens).all() and (found.steps == plain.steps).all()
    assert {by.outputs for _, by, _ in asked} == {50}  # no other product than the head's
    if name == "t5gemma":
        return
    asked.clear()
    scored = decoded(BACKBONES[name], params, Products("auto", kernel), DecodingOptions(scores=True))
    assert not asked and (scored.tokens == plain.tokens).all()


def test_logits_with_further_operations_are_computed_completely():
    class Raised(t5gemma.T5Gemma):
        def logits(self, hidden):
            return super().logits(hidden).at[..., 5].add(9.0)

    assert kernel_backends._cap(Raised(GEMMA, dtype=jnp.float32)) is None
    assert kernel_backends._cap(t5gemma.T5Gemma(GEMMA, dtype=jnp.float32)) == 4.0


def decoded(model, params, backend, options=GREEDILY):
    programs = Programs(model, jnp.dtype("float32"), devices=jax.local_devices()[:1], backend=backend)
    programs.set_params(params)
    return programs.decode(SOURCES, GRID, batch_size=3, across=1, report=Report(), options=options)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow) if x != "t5gemma" else x for x in BACKBONES])
def test_answers_equal_the_layers(name, kernel):
    model, forced = BACKBONES[name], np.random.default_rng(3).integers(3, 50, (3, 4, 12))
    params = varied(model, 1, centered=name != "umt5")
    scored = DecodingOptions(forced=forced.astype(np.int32), scores=True)
    found, wanted = (
        decoded(model, params, backend, scored).log_probs for backend in (Products("auto", kernel), Backend())
    )
    assert np.abs(wanted).max() > 1
    assert np.abs(np.asarray(found) - wanted).max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("weights", WEIGHTS[1:])
@pytest.mark.parametrize("name", BACKBONES)
def test_narrow_weights_are_rounded_as_the_layers_round_them(name, weights, kernel):
    model, forced = BACKBONES[name], np.random.default_rng(3).integers(3, 50, (3, 4, 12))
    params = varied(model, 1, centered=name != "umt5")
    scored = DecodingOptions(forced=forced.astype(np.int32), scores=True)
    found, wanted = (
        decoded(model, params, backend, scored).log_probs for backend in (Products(weights, kernel), Backend(weights))
    )
    assert np.abs(np.asarray(found) - wanted).max() < (0.5 if in_one_digit(weights, kernel) else 0.02)


@pytest.mark.parametrize("name", BACKBONES)
def test_matrices_of_a_step_are_stored_once(name, kernel):
    model = BACKBONES[name]
    params = varied(model, 1)
    ready = Products("auto", kernel).prepare(model.module(), params)
    flat = flatten_dict(params, sep="/")
    kernels = {path for path in flat if path.endswith("/kernel") and not path.startswith("encoder/")}
    of_source = {path for path in kernels if "cross_attention/key" in path or "cross_attention/value" in path}
    multiplied = {path.rpartition("/")[0] for path in kernels - of_source}
    tables = {*model.tables}
    if not any("lm_head" in path for path in flat):
        multiplied |= {model.tables[-1].rpartition("/")[0]}
    assert {*ready.decoding.matrices} == multiplied
    others = {*flatten_dict(ready.decoding.others, sep="/")}
    assert not any(path.endswith("/kernel") for path in others) and others & tables
    read = {*flatten_dict(ready.encoding, sep="/")}
    both = {
        path
        for path in kernels
        if name == "t5gemma2" and "self_attention/" in path and path.split("/")[3] in ("key", "value")
    }
    assert {path for path in read if path in kernels} == of_source | both
    assert sum(path.startswith("encoder/") for path in read) == sum(path.startswith("encoder/") for path in flat)


def test_inputs_that_fill_no_panels_are_left_to_the_layers(kernel):
    model = dataclasses.replace(GEMMA, decoder=dataclasses.replace(GEMMA.decoder, intermediate_size=20))
    matrices = Products("auto", kernel).prepare(model.module(), varied(model, 1)).decoding.matrices
    assert "decoder/layers_0/feed_forward/wi_0" in matrices and "decoder/layers_0/feed_forward/wo" not in matrices
    params = varied(model, 2, centered=True)
    found, wanted = (decoded(model, params, backend) for backend in (Products("auto", kernel), Backend()))
    assert (found.tokens == wanted.tokens).all() and (found.steps == wanted.steps).all() and found.lengths.sum() > 9


def test_method_that_does_more_than_multiply_is_not_replaced(kernel, monkeypatch):
    def louder(self, hidden):
        return 2 * layers.logits_of(hidden, self.embedding, self.dtype)

    monkeypatch.setattr(t5gemma.GemmaEmbedder, "logits", louder)
    matrices = Products("auto", kernel).prepare(GEMMA.module(), varied(GEMMA, 1)).decoding.matrices
    assert "decoder/embedder" not in matrices and "decoder/layers_0/feed_forward/wo" in matrices


class HalfTable(t5gemma.GemmaEmbedder):
    def setup(self):
        super().setup()
        self.embedding = 0.5 * self.embedding


class Lifted(layers.FeedForward):
    """Linear layers in Flax's transformations, which see a part of their kernel, or three times the kernel."""

    @nn.compact
    def __call__(self, x, deterministic):
        split = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "axis_size": 2, "in_axes": None}
        tripled = {"trans_in_fn": partial(jax.tree.map, lambda kernel: 3 * kernel), "init": self.is_initializing()}
        for name, lifted in {
            "experts": nn.vmap(layers.Linear, **split),
            "tripled": nn.map_variables(layers.Linear, "params", **tripled),
        }.items():
            found = lifted(self.config.d_model, self.dtype, layers.normal(0.2), name=name)(x)
            x = x + found.reshape(-1, *x.shape).sum(axis=0)
        return x


class Gated(t5.Decoder):
    """A module with a parameter that no step reads."""

    layer = type("Layer", (t5.DecoderLayer,), {"feed_forward_class": Lifted})

    def setup(self):
        super().setup()
        self.gate = self.param("gate", nn.initializers.ones, (16,))

    def memorize(self, encoded, mask):
        return super().memorize(encoded * self.gate, mask)


class GatedT5(t5.T5):
    decoder_stack = Gated


def test_changed_or_shape_only_parameters_are_left_to_the_layers(kernel):
    config = T5Config(50, 16, 8, 32, 2, 1, 1, tied_head=False)
    model, backend = GatedT5(config), Products("auto", kernel)
    shapes, rng = jax.eval_shape(model.init, jax.random.key(0), *smallest_batch())["params"], np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(0.3 * rng.standard_normal(x.shape), x.dtype), shapes)
    ready = backend.prepare(model, params)
    assert not any("feed_forward" in path for path in ready.decoding.matrices) and "lm_head" in ready.decoding.matrices
    source = jnp.ones((1, 16), jnp.int32), jnp.ones(1, jnp.int32)
    memory = jax.eval_shape(partial(backend.encode, model), ready.encoding, *source)
    step = partial(kernel_backends._step, model, memory)
    wanted = jax.jit(step)(params)
    with products.multiplying(ready.decoding.matrices, kernel):
        found = jax.jit(lambda params: step(params))(ready.decoding.others)
    assert np.abs(found - wanted).max() < 1e-4 < np.abs(wanted).max()


def test_table_changed_by_a_subclass_is_left_to_the_layers(kernel, monkeypatch):
    monkeypatch.setattr(t5gemma, "GemmaEmbedder", HalfTable)
    matrices = Products("auto", kernel).prepare(GEMMA.module(), varied(GEMMA, 1)).decoding.matrices
    assert "decoder/embedder" not in matrices and "decoder/layers_0/feed_forward/wo" in matrices


@pytest.mark.parametrize("owner, name", [(layers.Linear, "__call__"), (layers, "logits_of")])
def test_product_replaced_from_outside_is_used(owner, name, kernel, monkeypatch):
    monkeypatch.setattr(cpu_kernel, "use", lambda: kernel)
    monkeypatch.setattr(owner, name, lambda *given: None)
    assert type(backends.fastest(GEMMA, jnp.float32)) is Backend


def test_replaced_product_of_the_head_is_used_by_t5gemma(monkeypatch):
    variables, hidden = {"params": varied(GEMMA, 1)}, jnp.ones((1, 16))
    assert GEMMA.module().apply(variables, hidden, method="logits").any()
    monkeypatch.setattr(layers, "logits_of", lambda hidden, rows, dtype: 0 * hidden @ rows.T)
    assert not GEMMA.module().apply(variables, hidden, method="logits").any()


def test_kernel_is_used_where_possible(kernel, monkeypatch):
    monkeypatch.setattr(cpu_kernel, "use", lambda: kernel)
    chosen = backends.fastest(GEMMA, jnp.float32, "int8")
    assert type(chosen) is Products and chosen.weights == "int8"
    assert type(backends.fastest(GEMMA, jnp.bfloat16)) is Backend
    assert type(backends.choose(backends.XLA, GEMMA, jnp.float32, "auto")) is Backend
    assert type(backends.fastest(T5Config(50, 16, 16, 32, 2, 2, 2), jnp.float32)) is OwnKernel
    monkeypatch.setattr(cpu_kernel, "use", lambda: None)
    assert type(backends.fastest(GEMMA, jnp.float32)) is Backend


@pytest.mark.parametrize(
    "columns, outputs, says",
    [((2, 16), 16, "matrix: found F32 [1, 32, 16, 1]; expected F32 [1, 16, 16, 1]"), ((2, 32), 40, "another size")],
)
def test_the_kernel_refuses_other_sizes(columns, outputs, says, kernel):
    by = products.Panels(matrix({"embedding": jnp.ones((16, 32))}, weights="auto"), 16)
    wrong = by.matrix.replace(rows=jnp.broadcast_to(by.matrix.rows, (outputs // 16, *by.matrix.rows.shape[1:])))
    sizes = {"N": columns[0], "I": columns[1], "O": 16, "finer": 0}
    call = jax.ffi.ffi_call(f"pipejax_product_{kernel.name}", jax.ShapeDtypeStruct((columns[0], outputs), jnp.float32))
    given = products.fields.arrays(
        "PRODUCT_FIELDS", {"columns": jnp.ones(columns), "matrix": by.matrix if outputs == 40 else wrong}
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"product: .*") as caught:
        call(*given, numbers=products.fields.numbers("PRODUCT_NUMBERS", sizes))
    assert says in str(caught.value)
