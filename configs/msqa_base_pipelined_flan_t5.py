"""MultiSpanQA, Flan-T5-Base, the pipelined decoder: an example of another T5, as train.init_from sets it in any config.

    python -m pipejax data prepare msqa --manual-dir DIR     # without DIR it says which files it needs
    python -m pipejax convert from-hf google/flan-t5-base checkpoints/flan-t5-base
    python train.py --config configs/msqa_base_pipelined_flan_t5.py --workdir runs/msqa_base_pipelined_flan_t5

The same as configs/msqa_base_pipelined.py with --set train.init_from=checkpoints/flan-t5-base. One card of 24 GB; 1,907
steps are ten epochs. The paper has no numbers for it.
"""

from pipejax.training.recipes import paper

config = paper("msqa", size="base", objective="pipelined", train_examples=4_577, init_from="checkpoints/flan-t5-base")
