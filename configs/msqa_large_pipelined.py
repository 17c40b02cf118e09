"""MultiSpanQA, T5-Large, the pipelined decoder.

    python -m pipejax data prepare msqa --manual-dir DIR     # without DIR it says which files it needs
    python -m pipejax convert from-hf google-t5/t5-large checkpoints/t5-large
    python train.py --config configs/msqa_large_pipelined.py --workdir runs/msqa_large_pipelined

Two cards of 24 GB (the paper: RTX 4090); 1,907 steps are ten epochs of 4,577 examples.
The paper, EM F1 / PM F1: dev 75.0/87.2, test 74.0/87.1; 5.3 examples/s (1.7x), 3,710 M.
"""

from pipejax.training.recipes import paper

config = paper("msqa", size="large", objective="pipelined", train_examples=4_577)
