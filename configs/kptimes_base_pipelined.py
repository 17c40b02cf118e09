"""KPTimes, T5-Base, the pipelined decoder.

    python -m pipejax data prepare kptimes --manual-dir DIR     # without DIR it says which files it needs
    python -m pipejax convert from-hf google-t5/t5-base checkpoints/t5-base
    python train.py --config configs/kptimes_base_pipelined.py --workdir runs/kptimes_base_pipelined

One card of 24 GB (the paper: RTX 4090); 108,301 steps are ten epochs of 259,923 examples.
The paper, F1@5/F1@M: present 32.2/50.8, absent 22.8/33.4; 8.4 examples/s (2.5x), 1,467 M.
"""

from pipejax.training.recipes import paper

config = paper("kptimes", size="base", objective="pipelined", train_examples=259_923)
