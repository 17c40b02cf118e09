"""WikiHowQA, T5-Large, the pipelined decoder.

    python -m pipejax data prepare wikihowqa --manual-dir DIR     # without DIR it says which files it needs
    python -m pipejax convert from-hf google-t5/t5-large checkpoints/t5-large
    python train.py --config configs/wikihowqa_large_pipelined.py --workdir runs/wikihowqa_large_pipelined

Two cards of 24 GB (the paper: RTX 4090); 53,750 steps are ten epochs of 129,000 examples (rounded in the paper).
The paper, ROUGE-1/2/L: dev 40.9/18.4/39.7, test 37.3/15.6/36.2; 2.6 examples/s (5.2x).
"""

from pipejax.training.recipes import paper

config = paper("wikihowqa", size="large", objective="pipelined", train_examples=129_000)
