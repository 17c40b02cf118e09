"""KPTimes, T5-Large, the sequential baseline.

    python -m pipejax data prepare kptimes --manual-dir DIR     # without DIR it says which files it needs
    python -m pipejax convert from-hf google-t5/t5-large checkpoints/t5-large
    python train.py --config configs/kptimes_large_sequential.py --workdir runs/kptimes_large_sequential

Two cards of 24 GB (the paper: RTX 4090); 108,301 steps are ten epochs of 259,923 examples.
The paper, F1@5/F1@M: present 34.8/51.8, absent 24.7/34.1; 1.8 examples/s, 3,944 M.
"""

from pipejax.training.recipes import paper

config = paper("kptimes", size="large", objective="sequential", train_examples=259_923)
