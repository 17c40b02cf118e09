"""The embedded task of `make demo`, generated from a seed without a download: the contents of baskets in a note.

    python train.py --config configs/demo.py --workdir runs/demo
    python train.py --config configs/demo.py --workdir runs/demo_sequential --set train.method=sequential

Each command takes one to two minutes on two CPU cores. The expected exact-match F1 on unseen documents is above 98 for
both.
"""

from pipejax.config import Config, DataConfig, DecodeConfig, GridConfig, T5Config, TrainConfig

config = Config(
    name="demo",
    model=T5Config(vocab_size=96, d_model=192, d_kv=32, d_ff=512, num_heads=6, num_layers=2, num_decoder_layers=3),
    grid=GridConfig(delay=1, time_max=20, sub_max=8),
    data=DataConfig(task="demo_long", max_source=48, max_target=96, separator=" ; "),
    train=TrainConfig(
        steps=450,
        batch_size=16,
        shapes=2,
        learning_rate=1e-3,
        schedule="linear",
        warmup_steps=100,
        beta2=0.98,
        dropout=0.0,
        log_every=50,
        evaluate_every=225,
        evaluate_examples=128,
        checkpoint_every=225,
    ),
    decode=DecodeConfig(max_length=80, batch_size=64),
)
