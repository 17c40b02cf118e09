"""MultiSpanQA, T5-Base, the sequential baseline.

    python -m pipejax data prepare msqa --manual-dir DIR     # without DIR it says which files it needs
    python -m pipejax convert from-hf google-t5/t5-base checkpoints/t5-base
    python train.py --config configs/msqa_base_sequential.py --workdir runs/msqa_base_sequential

One card of 24 GB (the paper: RTX 4090); 1,907 steps are ten epochs of 4,577 examples.
The paper, EM F1 / PM F1: dev 72.2/84.8, test 72.3/84.9; 5.4 examples/s, 1,802 M.
"""

from pipejax.training.recipes import paper

config = paper("msqa", size="base", objective="sequential", train_examples=4_577)
