"""KP20k for a small T5 of one's own making: a comparison of objectives, not of scores.

    python -m experiments.pretraining --output runs/copying texts.jsonl ...     # and train it: see configs/copying.py
    python train.py --config configs/kp20k_scratch.py --workdir runs/kp20k_scratch_pipelined --set data.data_dir=DIR
    python -m experiments.tables --output tables --run --sizes scratch --tasks kp20k --crossed

The data are what `python -m pipejax data prepare kp20k` wrote, or, with data.task=jsonl, data.train, data.dev and
data.test, lines of one's own. What came of fewer steps on two CPU cores is in docs/LOG.md. Nothing in the paper
compares with it.
"""

from pipejax.training.recipes import scratch

config = scratch("kp20k", steps=1600, max_source=192)
