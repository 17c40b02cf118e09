"""Comparisons of a backbone with its model in transformers: weights, logits, gradients, and Algorithm 1 with it."""

import dataclasses
import importlib.util
import itertools
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax.traverse_util import flatten_dict, unflatten_dict

from pipejax.config import Config, DecodeConfig, TrainConfig
from pipejax.convert import description
from pipejax.decoding import TRUNCATIONS, Pipelined, Sizes
from pipejax.inference.backends import Backend
from pipejax.inference.generator import Generator
from pipejax.model import layers
from pipejax.model.backbone import Backbone
from support import oracle, schemas
from support.batches import padded, rows_of, sources
from support.one_program import compiled

# The arguments of a model of transformers in torch: source [B, L] and its mask, tokens [B, N], their visibility
# bool [N, N], and positions [N].
Logits = Callable[..., torch.Tensor]
SURE = 1e-4  # with a smaller margin, other rounding may change a choice
NEAR = 1e-4
# The vision tower of a T5Gemma 2 in transformers, which exists in models for texts, too.
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def written_module(config: Config, place: Path) -> types.ModuleType:
    """Imports the generate.py that `to-hf` writes to a directory."""
    file = place / "generate.py"
    file.write_text(description.custom_generate(config, None) or "")
    spec = importlib.util.spec_from_file_location(f"generate_{place.name}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # required by dataclasses
    spec.loader.exec_module(module)
    return module


def config_facts(model: Backbone) -> dict[str, Any]:
    """The arguments with which a config class of transformers describes a backbone."""
    return {key: x for key, x in model.facts().items() if key not in ("architectures", "model_type")}


def varied(model: Backbone, seed: int, *, centered: bool = False) -> dict[str, Any]:
    """Random parameters with varied greedy answers, as in `oracle.random_params`, without a compiled program.

    `centered`: whether norms multiply by 1 + scale.
    """
    rng, sizes, drawn = np.random.default_rng(seed), model.sizes(), dict[str, np.ndarray]()
    for path, (_, axes) in model.tensors().items():
        shape = [sizes[axis][1] for axis in axes]
        loud = 3 if re.search("(?<!cross_)attention/output", path) else 1
        center, scale = 0.0, loud * shape[0] ** -0.5
        if path.endswith("norm/scale"):
            center, scale = (-1.0 if path == "decoder/norm/scale" else 1.0) - centered, 0.2
        elif path.endswith("embedding"):
            scale = 4 if "relative_bias" in path else 1.5
        drawn[path] = (center + scale * rng.standard_normal(shape)).astype(np.float32)
        if path in model.tables:
            drawn[path][[*model.end_token_ids]] *= 1.5
    return unflatten_dict(drawn, sep="/")


def tensors(model: Backbone, params: Any) -> dict[str, torch.Tensor]:
    """The parameters under the names of transformers."""
    flat = flatten_dict(params, sep="/")
    return {
        name: torch.from_numpy(np.ascontiguousarray(flat[path].T if path.endswith("kernel") else flat[path]))
        for path, (name, _) in model.tensors().items()
    }


def batch(model: Backbone, slots: int) -> list[np.ndarray]:
    """A teacher-forced batch: source, its mask, tokens, and the mask and positions of a grid."""
    rng = np.random.default_rng(slots)
    source, tokens = (rng.integers(2, model.vocab_size, (3, size)) for size in (11, slots))
    cells = [(i % 3, i // 3 + 2 * (i % 3)) for i in range(slots)]  # three rows, two steps apart
    return [
        *(source, np.arange(11) < np.asarray([[11], [4], [8]]), tokens),
        *(np.asarray(oracle.visibility(cells))[None], np.asarray([[row + time for row, time in cells]])),
    ]


def check_logits_and_gradients(
    model: Backbone, params: Any, torchs: Any, logits: Logits, table: Any
) -> dict[str, float]:
    """Asserts that logits and gradients are equal up to rounding; returns the largest differences.

    Differences of gradients are relative to the largest number of a tensor. `table`: the torch tensor of each
    parameter, by its path.
    """
    given = batch(model, 30)
    source, real, tokens, mask, position = (torch.from_numpy(x) for x in given)
    expected = logits(source, real, tokens, mask[0], position[0])
    told = np.random.default_rng(1).standard_normal(expected.shape).astype(np.float32)
    (expected * torch.from_numpy(told)).sum().backward()

    def weighed(params: Any) -> Any:
        found = model.module().apply({"params": params}, *given)
        return (found * told).sum(), found

    (_, found), gradients = jax.jit(jax.value_and_grad(weighed, has_aux=True))(params)
    apart = {"logits": float(abs(found - expected.detach().numpy()).max())}
    for path, gradient in flatten_dict(gradients, sep="/").items():
        other = table(path).grad.numpy()
        other = other.T if path.endswith("kernel") else other
        apart[path] = float(abs(np.asarray(gradient) - other).max() / max(abs(other).max(), 1))
        assert abs(other).max() > 1e-3, path  # otherwise the comparison would be empty
    assert max(apart.values()) < NEAR, {path: x for path, x in apart.items() if x >= NEAR}
    return {"logits": apart.pop("logits"), "gradients": max(apart.values())}


def check_dropout(model: Backbone, params: Any, torchs: Any, logits: Logits) -> None:
    """Asserts that the inputs of dropout modules in a training step have torch's shapes, in torch's order."""
    given, expected, found = batch(model, 10), list[tuple[int, ...]](), list[tuple[int, ...]]()
    source, real, tokens, mask, position = (torch.from_numpy(x) for x in given)
    modules = [module for module in torchs.modules() if isinstance(module, torch.nn.Dropout)]
    hooks = [module.register_forward_hook(lambda _, x, y: expected.append((*y.shape,))) for module in modules]
    with torch.no_grad():
        logits(source, real, tokens, mask[0], position[0])
    for hook in hooks:
        hook.remove()

    def look(call: Callable[..., Any], x: Any, more: Any, context: nn.module.InterceptorContext) -> Any:
        if isinstance(context.module, layers.Dropout):
            assert context.module.rate == 0.1
            found.append(x[0].shape)
        return call(*x, **more)

    def apply(params: Any) -> Any:
        rngs = {"dropout": jax.random.key(0)}
        return model.module(dropout=0.1).apply({"params": params}, *given, deterministic=False, rngs=rngs)

    with nn.intercept_methods(look):
        jax.eval_shape(apply, params)
    assert found == expected


@dataclasses.dataclass
class Greedy:
    """The greedy choices of a model of transformers for `oracle.algorithm1`, from all rows again at every step."""

    logits: Logits
    source: Sequence[int]
    delay: int
    ends: Sequence[int]
    margin: float = np.inf  # the least margin, of rows that had not ended

    def last(self, rows: list[list[int]]) -> np.ndarray:
        """The logits [R, V] after each row's last token."""
        cells = oracle.coordinates(rows, self.delay)
        ids, tokens = torch.tensor([[*self.source]]), torch.tensor([[token for row in rows for token in row]])
        visible = torch.tensor(oracle.visibility(cells))
        position = torch.tensor([row + time for row, time in cells])
        with torch.no_grad():
            logits = self.logits(ids, torch.ones_like(ids, dtype=torch.bool), tokens, visible, position)[0].numpy()
        found: np.ndarray = logits[np.cumsum([len(row) for row in rows]) - 1]
        return found

    def __call__(self, rows: list[list[int]]) -> list[int]:
        last = self.last(rows)
        self.margin = min(
            [self.margin, *(oracle.margin(x) for row, x in zip(rows, last, strict=True) if row[-1] not in self.ends)]
        )
        return [int(x) for x in last.argmax(axis=1)]


def check_algorithm_1(
    model: Backbone,
    models: Callable[[int], tuple[Any, Logits]],
    count: int,
    *,
    delay: int,
    literal: bool,
    examples: int = 3,
    time_max: int = 12,
    sub_max: int = 4,
) -> int:
    """Checks rows, steps and truncation of `count` random models in batches of mixed lengths.

    Returns the longest answer. `models`: gives the parameters and the logits of a model by its number.
    """
    bos, ends = model.decoder_start_token_id, model.end_token_ids
    strategy = Pipelined(delay, time_max, sub_max, literal, bos, ends[0], other_ends=ends[1:])
    program = compiled(model, strategy, Sizes.fit(strategy, examples), backend=Backend())
    compared, longest, answers = 0, 0, set()
    for seed in range(count):
        params, logits = models(seed)
        texts = sources(np.random.default_rng([seed, delay]), examples, model.vocab_size)
        decoded = jax.device_get(program(jax.tree.map(jnp.asarray, params), *padded(texts)))
        for b, text in enumerate(texts):
            chooses = Greedy(logits, text, delay, ends)
            expected = oracle.algorithm1(
                chooses,
                delay=delay,
                time_max=time_max,
                sub_max=sub_max,
                stop="literal" if literal else "empty_row",
                bos=bos,
                eos=ends,
            )
            if chooses.margin < SURE:
                continue
            assert [row for row in rows_of(decoded, b) if row] == expected.rows, (seed, b)
            assert decoded.steps[b] == expected.steps
            assert TRUNCATIONS[decoded.truncated[b]] == expected.truncated
            compared, longest = compared + 1, max([longest, *map(len, expected.rows)])
            answers.add(str(expected.rows))
    assert compared > 0.8 * count * examples and len(answers) > 0.3 * compared
    return longest


def until_end(tokens: Sequence[int], model: Backbone) -> list[int]:
    """The tokens before the first end token."""
    return [*itertools.takewhile(lambda token: token not in model.end_token_ids, tokens)]


def check_greedy_tokens(model: Backbone, params: Any, torchs: Any, *, lowest: int, various: int = 3) -> Counter[int]:
    """Compares sequential answers to sources of ids from `lowest` on with answers of transformers' `generate`.

    At least `various` answers must be varied. Returns counts of the last tokens.
    """
    generator = Generator(Config(model=model, decode=DecodeConfig(max_length=12)), params, None)
    rng, texts, ends = np.random.default_rng(2), [], Counter[int]()
    for source in [[*rng.integers(lowest, 9, n).tolist(), 1] for n in (3, 5, 8, 8, 2)]:
        (found,) = generator.decode([source], method="sequential")
        expected = torchs.generate(torch.tensor([source]), max_new_tokens=12, do_sample=False)[0, 1:].tolist()
        texts.append(expected)
        assert found["row_ids"] == [until_end(expected, model)]
        ends[expected[-1]] += 1
    assert len(set(map(str, texts))) >= various
    return ends


def check_beams(
    model: Backbone, params: Any, torchs: Any, *, lowest: int, beams: int = 3, least: int = 3
) -> Counter[int]:
    """Compares answers of beam search with transformers; the best must differ from the greedy answer often enough.

    The count of these answers is the count of -1 in the result.
    """
    decode = DecodeConfig(max_length=12, beams=beams)
    config = Config(model=model, decode=decode, train=TrainConfig(method="none"))
    generator = Generator(config, params, None)
    rng, given = np.random.default_rng(2), {"max_new_tokens": 12, "do_sample": False}
    others, ends = 0, Counter[int]()
    texts = [[*rng.integers(lowest, 9, n).tolist(), 1] for n in (3, 5, 8, 8, 2, 6, 4, 7)]
    for source, record in zip(texts, generator.decode(texts), strict=True):
        best, greedy = (
            torchs.generate(torch.tensor([source]), num_beams=n, **given)[0, 1:].tolist() for n in (beams, 1)
        )
        assert record["row_ids"] == [until_end(best, model)]
        others += best != greedy
        ends[best[-1]] += 1
    assert others >= least
    return ends + Counter({-1: others})


def check_schema(model: Backbone, params: Any, logits: Logits, *, delay: int) -> None:
    """Checks answers under a schema of few texts: each token is the best after which a text can be completed."""
    made = schemas.generator(of=(model, params), delay=delay, time_max=12 + 2 * delay)
    asked = {"type": "object", "properties": {name: {"enum": values} for name, values in schemas.FINITE.items()}}
    under, answers, compared = made.under(asked).answer_format, set(), 0
    assert under is not None and made.tokenizer is not None
    for text in ("a red fish", "2024", "the", "ab ab", "no", "5 5"):
        chooses, margins = Greedy(logits, made.ids_of(made.source(text, "here", 0)), delay, (1,)), list[float]()
        expected = oracle.algorithm1(
            schemas.choices(made, chooses.last, under.rows, [], margins),
            delay=delay,
            time_max=made.config.grid.time_max,
            sub_max=4 if delay else 3,
            stop="empty_row",
            bos=model.decoder_start_token_id,
            prefixes=[row.beginning for row in under.rows],
        )
        (record,) = made.decode([text], schema=asked)
        if min(margins) > SURE:
            assert record["row_ids"] == [[token for token in row[1:] if token != 1] for row in expected.all_rows[:3]]
            compared += 1
        answers.add(str(record["row_ids"]))
    assert compared > 4 and len(answers) > 1
