"""PubMed, T5-Large, the pipelined decoder.

    python -m pipejax data prepare pubmed --manual-dir DIR     # without DIR it says which files it needs
    python -m pipejax convert from-hf google-t5/t5-large checkpoints/t5-large
    python train.py --config configs/pubmed_large_pipelined.py --workdir runs/pubmed_large_pipelined

Two cards of 24 GB (the paper: RTX 4090); 49,968 steps are ten epochs of 119,924 examples.
The paper, ROUGE-1/2/L: dev 38.7/17.8/35.8, test 38.4/17.9/36.2; 0.7 examples/s (7.0x).
"""

from pipejax.training.recipes import paper

config = paper("pubmed", size="large", objective="pipelined", train_examples=119_924)
