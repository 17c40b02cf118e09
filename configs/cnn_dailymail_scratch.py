"""CNN/DailyMail from random weights, a T5 small enough for two CPU cores: a comparison of objectives, not of scores.

    python train.py --config configs/cnn_dailymail_scratch.py --workdir runs/cnn_dailymail_scratch_pipelined \
        --set data.tokenizer=DIR --set data.data_dir=DIR
    python -m experiments.tables --output tables --run --sizes scratch --tasks cnn_dailymail --set data.tokenizer=DIR

The tokenizer is T5's; the data are what `python -m pipejax.data prepare cnn_dailymail` wrote, or with
`--set data.task=jsonl` lines of one's own. Never trained to its end yet; nothing in the paper compares with it.
"""

from pipejax.recipes import scratch

config = scratch("cnn_dailymail", steps=1600, max_source=256)
