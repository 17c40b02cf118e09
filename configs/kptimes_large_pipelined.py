"""KPTimes, T5-Large, the pipelined decoder.

    python -m pipejax data prepare kptimes --manual-dir DIR     # without DIR it says which files it needs
    python -m pipejax convert from-hf google-t5/t5-large checkpoints/t5-large
    python train.py --config configs/kptimes_large_pipelined.py --workdir runs/kptimes_large_pipelined

Two cards of 24 GB (the paper: RTX 4090); 108,301 steps are ten epochs of 259,923 examples.
The paper, F1@5/F1@M: present 32.6/51.6, absent 22.8/34.0; 4.4 examples/s (2.4x), 3,814 M.
"""

from pipejax.training.recipes import paper

config = paper("kptimes", size="large", objective="pipelined", train_examples=259_923)
