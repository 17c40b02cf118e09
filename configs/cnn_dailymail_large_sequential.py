"""CNN/DailyMail, T5-Large, the sequential baseline.

    python -m pipejax data prepare cnn_dailymail --manual-dir DIR     # without DIR it says which files it needs
    python -m pipejax convert from-hf google-t5/t5-large checkpoints/t5-large
    python train.py --config configs/cnn_dailymail_large_sequential.py --workdir runs/cnn_dailymail_large_sequential

Two cards of 24 GB (the paper: RTX 4090); 119,630 steps are ten epochs of 287,113 examples.
The paper, ROUGE-1/2/L: as T5-Base (dev 39.6/17.8/37.5, test 39.2/17.4/37.1), which is suspect; 0.7 examples/s.
"""

from pipejax.training.recipes import paper

config = paper("cnn_dailymail", size="large", objective="sequential", train_examples=287_113)
