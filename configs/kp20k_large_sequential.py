"""KP20k, T5-Large, the sequential baseline.

    python -m pipejax data prepare kp20k --manual-dir DIR     # without DIR it says which files it needs
    python -m pipejax convert from-hf google-t5/t5-large checkpoints/t5-large
    python train.py --config configs/kp20k_large_sequential.py --workdir runs/kp20k_large_sequential

Two cards of 24 GB (the paper: RTX 4090); 212,424 steps are ten epochs of 509,818 examples.
The paper, F1@5/F1@M: present 33.0/40.5, absent 2.1/4.1; 1.6 examples/s, 3,972 M.
"""

from pipejax.training.recipes import paper

config = paper("kp20k", size="large", objective="sequential", train_examples=509_818)
