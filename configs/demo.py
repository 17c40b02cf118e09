"""The embedded task, generated from a seed: several spans of a short document, in order. Needs no download.

    python train.py --config configs/demo.py --workdir runs/demo
    python train.py --config configs/demo.py --workdir runs/demo_sequential --set train.objective=sequential

Two CPU cores: about a minute each. Expected: exact-match F1 above 90 on unseen documents for both.
"""

from pipejax.config import Config, DataConfig, DecodeConfig, GridConfig, T5Config, TrainConfig

config = Config(
    name="demo",
    model=T5Config(vocab_size=64, d_model=64, d_kv=16, d_ff=128, num_heads=4, num_layers=2, num_decoder_layers=2),
    grid=GridConfig(delay=1, time_max=16, sub_max=8),
    data=DataConfig(task="demo", max_source=64, max_target=64, separator=" ; "),
    train=TrainConfig(
        steps=2000,
        batch_size=32,
        learning_rate=3e-3,
        schedule="linear",
        warmup_steps=100,
        beta2=0.98,
        dropout=0.0,
        log_every=100,
        evaluate_every=1000,
        checkpoint_every=1000,
    ),
    decode=DecodeConfig(max_length=48, batch_size=64),
)
