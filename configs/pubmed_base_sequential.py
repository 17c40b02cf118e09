"""PubMed, T5-Base, the sequential baseline.

    python -m pipejax data prepare pubmed --manual-dir DIR     # without DIR it says which files it needs
    python -m pipejax convert from-hf google-t5/t5-base checkpoints/t5-base
    python train.py --config configs/pubmed_base_sequential.py --workdir runs/pubmed_base_sequential

One card of 24 GB (the paper: RTX 4090); 49,968 steps are ten epochs of 119,924 examples.
The paper, ROUGE-1/2/L: dev 39.8/18.3/36.9, test 39.7/18.2/36.8; 0.2 examples/s.
"""

from pipejax.training.recipes import paper

config = paper("pubmed", size="base", objective="sequential", train_examples=119_924)
