"""KP20k for a small T5 that is trained from random weights, to compare methods rather than scores.

    python -m lab.experiments.pretraining --output runs/copying texts.jsonl ...   # and train it: see configs/copying.py
    python train.py --config configs/kp20k_scratch.py --workdir runs/kp20k_scratch_pipelined --set data.data_dir=DIR
    python -m lab.experiments.tables --output tables --run --sizes scratch --tasks kp20k --crossed

The data are the files of `python -m pipejax data prepare kp20k`, or, with data.task=jsonl, data.train, data.dev and
data.test, your own lines. lab/LOG.md has results of fewer steps on two CPU cores. The paper has no comparable
experiment. The settings are our choice: 3.6 million parameters, batches of 16, sources of 192 tokens.
"""

from pipejax.config import Config, DataConfig, DecodeConfig, GridConfig, TrainConfig

config = Config(
    name="kp20k_scratch",
    grid=GridConfig(delay=1, time_max=50, sub_max=20),
    data=DataConfig(
        task="kp20k",
        max_source=192,
        max_target=256,
        separator="; ",
        metric="keyphrases_kp20k",  # set here because data.task=jsonl would choose another metric
    ),
    train=TrainConfig(
        steps=1600,
        batch_size=16,
        length_group=1,  # with so few steps, compiling more lengths would cost more than padding
        learning_rate=5e-4,
        schedule="linear",
        warmup_steps=80,
        beta2=0.98,
        weight_decay=0.01,
        init_from="runs/copying/run",
        evaluate_every=400,
        evaluate_examples=200,
        checkpoint_every=400,
    ),
    decode=DecodeConfig(max_length=128),
)
