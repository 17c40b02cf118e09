"""KPTimes, T5-Base, the sequential baseline.

    python -m pipejax data prepare kptimes --manual-dir DIR     # without DIR it says which files it needs
    python -m pipejax convert from-hf google-t5/t5-base checkpoints/t5-base
    python train.py --config configs/kptimes_base_sequential.py --workdir runs/kptimes_base_sequential

One card of 24 GB (the paper: RTX 4090); 108,301 steps are ten epochs of 259,923 examples.
The paper, F1@5/F1@M: present 33.7/51.0, absent 24.2/33.0; 3.4 examples/s, 1,534 M.
"""

from pipejax.training.recipes import paper

config = paper("kptimes", size="base", objective="sequential", train_examples=259_923)
