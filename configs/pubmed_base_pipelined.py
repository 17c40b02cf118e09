"""PubMed, T5-Base, the pipelined decoder.

    python -m pipejax data prepare pubmed --manual-dir DIR     # without DIR it says which files it needs
    python -m pipejax convert from-hf google-t5/t5-base checkpoints/t5-base
    python train.py --config configs/pubmed_base_pipelined.py --workdir runs/pubmed_base_pipelined

One card of 24 GB (the paper: RTX 4090); 49,968 steps are ten epochs of 119,924 examples.
The paper, ROUGE-1/2/L: dev 38.2/17.5/35.5, test 38.2/17.4/35.4; 1.3 examples/s (6.5x).
"""

from pipejax.training.recipes import paper

config = paper("pubmed", size="base", objective="pipelined", train_examples=119_924)
