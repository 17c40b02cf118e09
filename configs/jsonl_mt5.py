"""Your own data in languages other than English: JSON lines with mT5-Base, whose tokenizer has a hundred languages.

    python -m pipejax convert from-hf google/mt5-base checkpoints/mt5-base
    python train.py --config configs/jsonl_mt5.py --workdir runs/mine \
        --set data.train=train.jsonl --set data.dev=dev.jsonl

For titles and texts in separate fields, and keyphrases separated by ";", add:

        --set "data.source_template={title}: {text}" --set data.targets=keyphrases --set data.rows=delimiter \
        --set "data.delimiter=;" --set data.metric=keyphrases

By estimate the training fits on one card of 24 GB: mT5-Base has 580 million parameters, two thirds of them for its
250,000 pieces. mT5 was not fine-tuned on any task: use a higher rate and more steps than for a T5.
"""

from pipejax.config import Config, DataConfig, GridConfig, TrainConfig

config = Config(
    name="jsonl_mt5",
    grid=GridConfig(delay=1, time_max=50, sub_max=20),
    data=DataConfig(task="jsonl", max_source=1024, max_target=512, separator="; "),
    train=TrainConfig(
        steps=10_000,
        batch_size=24,
        accumulate=4,
        remat="layers",
        learning_rate=3e-4,
        warmup_steps=500,
        init_from="checkpoints/mt5-base",
    ),
)
