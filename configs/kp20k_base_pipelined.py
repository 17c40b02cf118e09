"""KP20k, T5-Base, the pipelined decoder.

    python -m pipejax data prepare kp20k --manual-dir DIR     # without DIR it says which files it needs
    python -m pipejax convert from-hf google-t5/t5-base checkpoints/t5-base
    python train.py --config configs/kp20k_base_pipelined.py --workdir runs/kp20k_base_pipelined

One card of 24 GB (the paper: RTX 4090); 212,424 steps are ten epochs of 509,818 examples.
The paper, F1@5/F1@M: present 27.8/40.1, absent 4.0/7.6; 5.1 examples/s (2.0x), 1,634 M.
"""

from pipejax.training.recipes import paper

config = paper("kp20k", size="base", objective="pipelined", train_examples=509_818)
