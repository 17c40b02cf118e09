"""MultiSpanQA, T5-Base, the pipelined decoder.

    python -m pipejax data prepare msqa --manual-dir DIR     # without DIR it says which files it needs
    python -m pipejax convert from-hf google-t5/t5-base checkpoints/t5-base
    python train.py --config configs/msqa_base_pipelined.py --workdir runs/msqa_base_pipelined

One card of 24 GB (the paper: RTX 4090); 1,907 steps are ten epochs of 4,577 examples.
The paper, EM F1 / PM F1: dev 72.5/85.2, test 71.5/84.3; 9.3 examples/s (1.7x), 1,798 M.
"""

from pipejax.training.recipes import paper

config = paper("msqa", size="base", objective="pipelined", train_examples=4_577)
