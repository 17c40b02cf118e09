"""WikiHowQA, T5-Base, the pipelined decoder.

    python -m pipejax data prepare wikihowqa --manual-dir DIR     # without DIR it says which files it needs
    python -m pipejax convert from-hf google-t5/t5-base checkpoints/t5-base
    python train.py --config configs/wikihowqa_base_pipelined.py --workdir runs/wikihowqa_base_pipelined

One card of 24 GB (the paper: RTX 4090); 53,750 steps are ten epochs of 129,000 examples (rounded in the paper).
The paper, ROUGE-1/2/L: dev 39.2/16.6/38.0, test 35.7/13.9/34.6; 4.6 examples/s (5.8x).
"""

from pipejax.training.recipes import paper

config = paper("wikihowqa", size="base", objective="pipelined", train_examples=129_000)
