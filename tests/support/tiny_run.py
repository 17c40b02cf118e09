"""A tiny run: its files, and readers of its directory. All batches have one shape, so that a run compiles once."""

import json
from pathlib import Path
from typing import Any

import numpy as np

STEPS, EVERY = 24, 4
CONFIG = '''"""The model and data of lab.faults."""
from pipejax.config import Config, DataConfig, DecodeConfig, GridConfig, T5Config, TrainConfig
config = Config(
    name="faults",
    model=T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=24, num_heads=4, num_layers=1, num_decoder_layers=1),
    grid=GridConfig(time_max=6, sub_max=3),
    data=DataConfig(task="jsonl", train="{here}/train.jsonl", dev="{here}/dev.jsonl", tokenizer="{here}/tokenizer"),
    train=TrainConfig(steps={steps}, batch_size=8, learning_rate=1e-3, warmup_steps=2, log_every=1, length_group=2,
                      shapes=1, evaluate_every={half}, checkpoint_every={every}, evaluate_examples=8),
    decode=DecodeConfig(max_length=8),
)
'''


def prepare(directory: Path) -> Path:
    """Writes data, tokenizer and config; returns the config's path."""
    from pipejax.apps import demo

    directory.mkdir(parents=True, exist_ok=True)
    demo.build_tokenizer(directory / "tokenizer")
    words, chance = np.asarray(demo.NOUNS), np.random.default_rng(0)
    for split, count in (("train", 200), ("dev", 16)):
        with (directory / f"{split}.jsonl").open("w") as file:
            for i in range(count):
                chosen = [str(word) for word in chance.choice(words, 8, replace=False)]
                example = {"id": f"{split}-{i}", "source": " ".join(chosen), "targets": chosen[:2]}
                file.write(json.dumps(example) + "\n")
    path = directory / "config.py"
    path.write_text(CONFIG.format(here=directory, steps=STEPS, every=EVERY, half=STEPS // 2))
    return path


def metrics(workdir: Path) -> list[dict[str, Any]]:
    """The complete lines of metrics.jsonl, without times and rates; an incomplete last line is left out."""
    path = workdir / "metrics.jsonl"
    lines = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return [{k: v for k, v in line.items() if "second" not in k and k != "compiled_shapes"} for line in lines]


def steps_made(workdir: Path) -> int:
    """The last step in the log."""
    return max((line["step"] for line in metrics(workdir) if line["event"] == "train"), default=0)


def committed(workdir: Path, kind: str = "checkpoints") -> list[int]:
    """The steps on disk, oldest first; for the `kind` "best", the step in best/."""
    return sorted(int(path.name) for path in workdir.glob(f"{kind}/*") if path.name.isdigit())
