"""CNN/DailyMail, T5-Base, the pipelined decoder.

    python -m pipejax data prepare cnn_dailymail --manual-dir DIR     # without DIR it says which files it needs
    python -m pipejax convert from-hf google-t5/t5-base checkpoints/t5-base
    python train.py --config configs/cnn_dailymail_base_pipelined.py --workdir runs/cnn_dailymail_base_pipelined

One card of 24 GB (the paper: RTX 4090); 119,630 steps are ten epochs of 287,113 examples.
The paper, ROUGE-1/2/L: dev 38.4/17.2/36.4, test 37.8/16.6/35.8; 2.9 examples/s (2.4x).
"""

from pipejax.training.recipes import paper

config = paper("cnn_dailymail", size="base", objective="pipelined", train_examples=287_113)
