"""WikiHowQA, T5-Large, the sequential baseline.

    python -m pipejax data prepare wikihowqa --manual-dir DIR     # without DIR it says which files it needs
    python -m pipejax convert from-hf google-t5/t5-large checkpoints/t5-large
    python train.py --config configs/wikihowqa_large_sequential.py --workdir runs/wikihowqa_large_sequential

Two cards of 24 GB (the paper: RTX 4090); 53,750 steps are ten epochs of 129,000 examples (rounded in the paper).
The paper, ROUGE-1/2/L: dev 41.2/18.5/40.1, test 37.8/15.7/36.7; 0.5 examples/s.
"""

from pipejax.training.recipes import paper

config = paper("wikihowqa", size="large", objective="sequential", train_examples=129_000)
