"""MultiSpanQA, T5-Large, the sequential baseline.

    python -m pipejax data prepare msqa --manual-dir DIR     # without DIR it says which files it needs
    python -m pipejax convert from-hf google-t5/t5-large checkpoints/t5-large
    python train.py --config configs/msqa_large_sequential.py --workdir runs/msqa_large_sequential

Two cards of 24 GB (the paper: RTX 4090); 1,907 steps are ten epochs of 4,577 examples.
The paper, EM F1 / PM F1: dev 75.5/87.3, test 74.7/87.3; 3.1 examples/s, 3,713 M.
"""

from pipejax.training.recipes import paper

config = paper("msqa", size="large", objective="sequential", train_examples=4_577)
