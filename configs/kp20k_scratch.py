"""KP20k from random weights, a T5 small enough for two CPU cores: a comparison of objectives, not of scores.

    python train.py --config configs/kp20k_scratch.py --workdir runs/kp20k_scratch_pipelined \
        --set data.tokenizer=DIR --set data.data_dir=DIR
    python -m experiments.tables --output tables --run --sizes scratch --tasks kp20k --crossed --set data.tokenizer=DIR

The tokenizer is T5's; the data are what `python -m pipejax.data prepare kp20k` wrote, or with `--set data.task=jsonl`
lines of one's own. Two cores: about half a second an update. A few thousand documents do not teach it to copy phrases
(docs/LOG.md); take the whole set. Nothing in the paper compares with it.
"""

from pipejax.recipes import scratch

config = scratch("kp20k", steps=2400, max_source=192)
