"""A T5 that is small enough for pretraining on two CPU cores, with examples that lab.experiments.pretraining makes.

    python -m lab.experiments.pretraining --output runs/copying texts.jsonl ...
    python train.py --config configs/copying.py --workdir runs/copying/words --set train.init_from=runs/copying/start \
        --set data.train=runs/copying/words.jsonl --set train.steps=500
    python train.py --config configs/copying.py --workdir runs/copying/run --set train.init_from=runs/copying/words \
        --set data.train=runs/copying/train.jsonl --set data.dev=runs/copying/dev.jsonl

`configs/kp20k_scratch.py` and `configs/cnn_dailymail_scratch.py` continue from this model. lab/LOG.md has figures of a
training with fewer updates.
"""

from pipejax.config import Config, DataConfig, DecodeConfig, T5Config, TrainConfig

config = Config(
    name="copying",
    model=T5Config(vocab_size=4000, d_model=192, d_kv=64, d_ff=768, num_heads=4, num_layers=3, num_decoder_layers=2),
    data=DataConfig(max_source=128, max_target=96, metric="rouge"),
    train=TrainConfig(
        method="sequential",
        steps=1600,
        batch_size=16,
        length_group=1,  # all stretches have similar lengths, and each further length would be compiled
        learning_rate=1e-3,
        schedule="linear",
        warmup_steps=200,
        beta2=0.98,
        weight_decay=0.01,
        dropout=0.0,
        log_every=100,
        evaluate_every=2000,
        evaluate_examples=100,
        checkpoint_every=500,
    ),
    decode=DecodeConfig(max_length=96),
)
