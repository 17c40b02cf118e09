"""WikiHowQA, T5-Base, the sequential baseline.

    python -m pipejax data prepare wikihowqa --manual-dir DIR     # without DIR it says which files it needs
    python -m pipejax convert from-hf google-t5/t5-base checkpoints/t5-base
    python train.py --config configs/wikihowqa_base_sequential.py --workdir runs/wikihowqa_base_sequential

One card of 24 GB (the paper: RTX 4090); 53,750 steps are ten epochs of 129,000 examples (rounded in the paper).
The paper, ROUGE-1/2/L: dev 39.5/16.7/38.3, test 35.9/14.1/34.9; 0.8 examples/s.
"""

from pipejax.training.recipes import paper

config = paper("wikihowqa", size="base", objective="sequential", train_examples=129_000)
