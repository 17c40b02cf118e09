"""CNN/DailyMail, T5-Large, the pipelined decoder.

    python -m pipejax data prepare cnn_dailymail --manual-dir DIR     # without DIR it says which files it needs
    python -m pipejax convert from-hf google-t5/t5-large checkpoints/t5-large
    python train.py --config configs/cnn_dailymail_large_pipelined.py --workdir runs/cnn_dailymail_large_pipelined

Two cards of 24 GB (the paper: RTX 4090); 119,630 steps are ten epochs of 287,113 examples.
The paper, ROUGE-1/2/L: dev 38.5/17.5/36.5, test 38.0/17.0/36.0; 1.6 examples/s (2.3x).
"""

from pipejax.training.recipes import paper

config = paper("cnn_dailymail", size="large", objective="pipelined", train_examples=287_113)
