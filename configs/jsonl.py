"""Your own data as JSON lines {"id", "source", "targets": [row, ...]}, with a converted checkpoint.

    python -m pipejax convert from-hf google/flan-t5-base checkpoints/flan-t5-base
    python train.py --config configs/jsonl.py --workdir runs/mine \
        --set train.init_from=checkpoints/flan-t5-base --set data.train=train.jsonl --set data.dev=dev.jsonl

The rate, batch and grid are the paper's (section 4.3). By estimate, T5-Base fits on one card of 24 GB, as in the paper:
each batch is computed in four parts, and layers are computed twice. With more memory, train.accumulate=1 and
train.remat=none are faster; with less memory, lower train.batch_size or data.max_source.
"""

from pipejax.config import Config, DataConfig, GridConfig, TrainConfig

config = Config(
    name="jsonl",
    grid=GridConfig(delay=1, time_max=50, sub_max=20),
    data=DataConfig(task="jsonl", max_source=2048, max_target=512, separator=" ; "),
    train=TrainConfig(steps=2000, batch_size=24, accumulate=4, remat="layers", learning_rate=1e-4, warmup_steps=100),
)
