"""KP20k, T5-Large, the pipelined decoder.

    python -m pipejax data prepare kp20k --manual-dir DIR     # without DIR it says which files it needs
    python -m pipejax convert from-hf google-t5/t5-large checkpoints/t5-large
    python train.py --config configs/kp20k_large_pipelined.py --workdir runs/kp20k_large_pipelined

Two cards of 24 GB (the paper: RTX 4090); 212,424 steps are ten epochs of 509,818 examples.
The paper, F1@5/F1@M: present 28.6/41.4, absent 3.9/7.5; 3.2 examples/s (2.0x), 3,813 M.
"""

from pipejax.training.recipes import paper

config = paper("kp20k", size="large", objective="pipelined", train_examples=509_818)
