"""A tiny model, configs that train it on the embedded task, and readers of the files of such a run."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipejax.config import Config, DataConfig, DecodeConfig, GridConfig, MeshConfig, T5Config, TrainConfig

MODEL = T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=24, num_heads=4, num_layers=1, num_decoder_layers=1)
DEEP = dataclasses.replace(MODEL, num_layers=2, num_decoder_layers=3)
# Few words: with random weights rows end soon and repeat themselves. Distances exceed the last bucket.
FEW_WORDS = T5Config(
    vocab_size=9,
    d_model=12,
    d_kv=4,
    d_ff=16,
    num_heads=2,
    num_layers=1,
    num_decoder_layers=2,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=20,
)
# More words, for sampling.
MORE_WORDS = T5Config(
    vocab_size=12, d_model=16, d_kv=4, d_ff=16, num_heads=2, num_layers=1, num_decoder_layers=2, dropout_rate=0.0
)
# Sizes that pipejax's kernels support.
IN_BLOCKS = T5Config(
    vocab_size=48,
    d_model=32,
    d_kv=16,
    d_ff=48,
    num_heads=2,
    num_layers=1,
    num_decoder_layers=2,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=20,
)
RUN = Config(
    name="tiny",
    model=MODEL,
    grid=GridConfig(delay=2, time_max=12, sub_max=4),
    data=DataConfig(task="demo"),
    train=TrainConfig(
        steps=6,
        batch_size=8,
        length_group=2,
        shapes=1,
        learning_rate=1e-3,
        warmup_steps=2,
        dropout=0.1,
        log_every=1,
        evaluate_every=3,
        evaluate_examples=8,
        checkpoint_every=3,
    ),
    decode=DecodeConfig(max_length=16),
)
# One device: compilation takes three quarters of the time.
RUN_ON_ONE = dataclasses.replace(RUN, mesh=MeshConfig(data=1))
# A single step without random numbers.
STEP = dataclasses.replace(
    RUN_ON_ONE,
    train=TrainConfig(batch_size=24, length_group=2, learning_rate=1e-3, warmup_steps=2, dropout=0.0),
    decode=DecodeConfig(),
)
MESHES = [
    {"data": 1},
    {"data": 8},
    {"data": 1, "fsdp": 8},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"data": 2, "tensor": 4},
    {"data": 4, "fsdp": 1, "tensor": 2},
]


def change(config: Config, **sections: dict[str, Any]) -> Config:
    """Returns the config with other values of some keys: `change(RUN, train={"steps": 3})`."""
    return dataclasses.replace(
        config, **{name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    )


def metrics(run: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's log."""
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def untimed(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines without times and rates."""
    return [{k: v for k, v in line.items() if "second" not in k and k != "compiled_shapes"} for line in lines]
