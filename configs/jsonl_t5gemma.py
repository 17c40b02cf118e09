"""Your own data as JSON lines, with low-rank factors of a T5Gemma, on one card of 24 GB.

    python -m pipejax convert from-hf google/t5gemma-b-b-prefixlm checkpoints/t5gemma-b-b
    python train.py --config configs/jsonl_t5gemma.py --workdir runs/mine \
        --set data.train=train.jsonl --set data.dev=dev.jsonl

The weights do not change, products are computed in bfloat16, and only the factors are trained. By the compiler's plan a
step takes 5.4 GiB of an RTX 4090; a step of T5Gemma l-l takes 8.2 GiB with `--set train.accumulate=8`. The float32
weights of 2b-2b alone have 21 GiB, so use two cards: `--set mesh.fsdp=2 --set train.accumulate=12 --set train.pack=1`.
"""

from pipejax.config import Config, DataConfig, GridConfig, TrainConfig

config = Config(
    name="jsonl_t5gemma",
    grid=GridConfig(delay=1, time_max=50, sub_max=20),
    data=DataConfig(task="jsonl", max_source=1024, max_target=512, separator="; "),
    train=TrainConfig(
        steps=5_000,
        batch_size=24,
        accumulate=4,
        remat="layers",
        learning_rate=2e-4,
        warmup_steps=200,
        lora_rank=16,
        init_from="checkpoints/t5gemma-b-b",
    ),
)
