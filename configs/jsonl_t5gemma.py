"""One's own data on a T5Gemma by low-rank factors: JSON lines, on one card of 24 GB.

    python -m pipejax convert from-hf google/t5gemma-b-b-prefixlm checkpoints/t5gemma-b-b
    python train.py --config configs/jsonl_t5gemma.py --workdir runs/mine \
        --set data.train=train.jsonl --set data.dev=dev.jsonl

The weights stay as they are in bfloat16 products, and factors beside them are trained. By the compiler's plan a step
takes 5.4 GiB of an RTX 4090, one of l-l 8.2 GiB with `--set train.accumulate=8`. For 2b-2b the float32 weights alone
are 21 GiB, so take two cards: `--set mesh.fsdp=2 --set train.accumulate=12 --set train.pack=1`.
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
