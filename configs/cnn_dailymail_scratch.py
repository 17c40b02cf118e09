"""CNN/DailyMail for a small T5 that is trained from random weights, to compare methods rather than scores.

    python -m lab.experiments.pretraining --output runs/copying texts.jsonl ...   # and train it: see configs/copying.py
    python train.py --config configs/cnn_dailymail_scratch.py --workdir runs/cnn_dailymail_scratch_pipelined \
        --set data.data_dir=DIR
    python -m lab.experiments.tables --output tables --run --sizes scratch --tasks cnn_dailymail --crossed

The data are the files of `python -m pipejax data prepare cnn_dailymail`, or, with data.task=jsonl, data.train, data.dev
and data.test, your own lines. lab/LOG.md has results of fewer steps on two CPU cores. The paper has no comparable
experiment. The settings are our choice: 3.6 million parameters, batches of 16, sources of 192 tokens.
"""

from pipejax.config import Config, DataConfig, DecodeConfig, GridConfig, TrainConfig

config = Config(
    name="cnn_dailymail_scratch",
    grid=GridConfig(delay=1, time_max=96, sub_max=20),
    data=DataConfig(
        task="cnn_dailymail",
        max_source=192,
        max_target=512,
        separator=" ",
        metric="rouge_score",  # set here because data.task=jsonl would choose another metric
    ),
    train=TrainConfig(
        steps=1200,
        batch_size=16,
        length_group=1,  # with so few steps, compiling more lengths would cost more than padding
        learning_rate=5e-4,
        schedule="linear",
        warmup_steps=60,
        beta2=0.98,
        weight_decay=0.01,
        init_from="runs/copying/run",
        evaluate_every=300,
        evaluate_examples=200,
        checkpoint_every=300,
    ),
    decode=DecodeConfig(max_length=256),
)
