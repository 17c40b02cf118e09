"""KP20k, T5-Base, the sequential baseline.

    python -m pipejax data prepare kp20k --manual-dir DIR     # without DIR it says which files it needs
    python -m pipejax convert from-hf google-t5/t5-base checkpoints/t5-base
    python train.py --config configs/kp20k_base_sequential.py --workdir runs/kp20k_base_sequential

One card of 24 GB (the paper: RTX 4090); 212,424 steps are ten epochs of 509,818 examples.
The paper, F1@5/F1@M: present 33.7/39.2, absent 2.2/4.2; 2.5 examples/s, 1,714 M.
"""

from pipejax.training.recipes import paper

config = paper("kp20k", size="base", objective="sequential", train_examples=509_818)
