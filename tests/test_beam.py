"""Beam search equals Hugging Face's in torch: tokens, ends and steps of random models, batches included."""

import dataclasses
import re
from collections import Counter

import jax
import numpy as np
import pytest
import torch
from transformers import T5ForConditionalGeneration

from pipejax.config import Config, DecodeConfig, GridConfig, T5Config, TrainConfig
from pipejax.convert.huggingface import write_hf
from pipejax.decoding import TRUNCATIONS, Sizes
from pipejax.inference.generator import Generator
from pipejax.system.errors import UserError
from support import oracle
from support.batches import padded, rows_of, sources
from support.one_program import compiled
from support.strategies import make
from support.tiny import FEW_WORDS

pytestmark = pytest.mark.usefixtures("compiled_once")

V1_0 = dataclasses.replace(FEW_WORDS, vocab_size=10, num_decoder_layers=1)
DEEPER = dataclasses.replace(V1_0, num_layers=2, num_decoder_layers=2)
V1_1 = dataclasses.replace(V1_0, vocab_size=13, feed_forward="gated-gelu", tied_head=False, scale_head=False)

# config, beams, length penalty, max_length, batch; sizes to run through: queries of a step, slots
SETTINGS = [
    (DEEPER, 2, 1.0, 14, 4, (6,), (8,)),
    (V1_0, 4, -1.0, 11, 1, (), ()),
    pytest.param(V1_0, 5, 2.0, 12, 5, (), (), marks=pytest.mark.long),
    (V1_1, 3, 0.0, 13, 5, (6,), ()),
    pytest.param(V1_1, 5, 0.6, 16, 4, (), (20,), marks=pytest.mark.long),
]
MODELS = 8  # random models for each setting


@pytest.fixture
def in_torch(tmp_path):
    """The same model for transformers."""

    def convert(config, params):
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        write_hf(config, params, directory, None)
        return T5ForConditionalGeneration.from_pretrained(directory).eval()

    return convert


def generate(model, texts, **settings):
    """The tokens of transformers after bos, and the number of decoder calls."""
    source, length = padded(texts)
    mask, calls = np.arange(source.shape[1]) < length[:, None], []
    hook = model.decoder.register_forward_hook(lambda *_: calls.append(1))
    ids, mask = torch.tensor(source).long(), torch.tensor(mask).long()
    found = model.generate(ids, attention_mask=mask, do_sample=False, **settings)[:, 1:].tolist()
    hook.remove()
    return found, len(calls)


def until_eos(tokens):
    """The tokens before eos, and the reason for truncation."""
    return (tokens[: tokens.index(1)], None) if 1 in tokens else (tokens, "max_length")


@pytest.mark.slow
@pytest.mark.parametrize(
    "config, beams, penalty, max_length, batch, queries, slots",
    SETTINGS,
    ids=lambda x: x.feed_forward if isinstance(x, T5Config) else None,
)
def test_beam_search_equals_transformers(config, beams, penalty, max_length, batch, queries, slots, in_torch):
    decode = DecodeConfig(max_length=max_length, beams=beams, length_penalty=penalty)
    strategy = make("sequential", GridConfig(), decode, bos=0, eos=1)
    program = compiled(config, strategy, Sizes.fit(strategy, batch, query_counts=queries, slots=slots))
    seen = Counter()
    for seed in range(MODELS):
        rng = np.random.default_rng([seed, beams, batch, 5])
        params = oracle.random_params(config, rng, eos_scale=1.5)
        texts, model = sources(rng, batch, config.vocab_size), in_torch(config, params)
        expected, calls = generate(model, texts, num_beams=beams, length_penalty=penalty, max_new_tokens=max_length)
        greedy, _ = generate(model, texts, max_new_tokens=max_length)
        decoded = jax.device_get(program(params, *padded(texts)))
        for b, tokens in enumerate(expected):
            row, truncated = until_eos(tokens)
            assert rows_of(decoded, b) == [row]
            assert TRUNCATIONS[decoded.truncated[b]] == truncated
            seen[truncated] += 1
            seen["other than greedy"] += row != until_eos(greedy[b])[0]
            seen["ahead of another"] += len(row) + 1 < decoded.steps[b] or decoded.steps[b] < decoded.steps.max()
        assert decoded.steps.max() == calls
    assert seen[None] and seen["max_length"] and min(seen["other than greedy"], seen["ahead of another"]) > 2, seen


@pytest.mark.slow
def test_generator_decodes_with_beams(in_torch):
    """Batches have the generator's sizes, with sources of any length, and are filled up."""
    rng = np.random.default_rng(8)
    params = oracle.random_params(V1_1, rng, eos_scale=1.5)
    texts, model = sources(rng, 5, V1_1.vocab_size), in_torch(V1_1, params)
    decode = DecodeConfig(max_length=50, beams=3, length_penalty=1.2, batch_size=2)
    generator = Generator(Config(model=V1_1, decode=decode, train=TrainConfig(method="none")), params, None)
    records = generator.decode(texts)
    for text, record in zip(texts, records, strict=True):
        [tokens], calls = generate(model, [text], num_beams=3, length_penalty=1.2, max_new_tokens=50)
        row, truncated = until_eos(tokens)
        assert (record["row_ids"], record["steps"], record["truncated"]) == ([row], calls, truncated)
    with pytest.raises(UserError, match=r"decode\.beams: found 3; expected 1, since beam search is sequential"):
        generator.decode(texts, method="pipelined")


@pytest.mark.parametrize(
    "setting, line",
    [
        ({"temperature": 0.5}, "temperature: found 0.5 @, which does not sample tokens; expected 0.0"),
        ({"scores": True}, "scores: found True @, which does not return log-probabilities; expected False"),
        (
            {"limit": "source"},
            "limit: found source @, which does not restrict answers to tokens of the source; expected none",
        ),
    ],
)
def test_settings_for_decoding_without_beams_are_refused(setting, line):
    with pytest.raises(UserError, match=f"^{re.escape('decode.' + line.replace('@', 'with decode.beams = 2'))}$"):
        make("sequential", GridConfig(), DecodeConfig(beams=2, **setting), bos=0, eos=1)
