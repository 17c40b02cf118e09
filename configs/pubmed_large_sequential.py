"""PubMed, T5-Large, the sequential baseline.

    python -m pipejax data prepare pubmed --manual-dir DIR     # without DIR it says which files it needs
    python -m pipejax convert from-hf google-t5/t5-large checkpoints/t5-large
    python train.py --config configs/pubmed_large_sequential.py --workdir runs/pubmed_large_sequential

Two cards of 24 GB (the paper: RTX 4090); 49,968 steps are ten epochs of 119,924 examples.
The paper, ROUGE-1/2/L: dev 40.5/18.9/37.6, test 40.5/18.7/37.6; 0.1 examples/s.
"""

from pipejax.training.recipes import paper

config = paper("pubmed", size="large", objective="sequential", train_examples=119_924)
