"""PubMed: the paper's experiment, T5-Base with the pipelined decoder.

    python -m pipejax data prepare pubmed --manual-dir DIR     # without DIR it lists the files that it needs
    python -m pipejax convert from-hf google-t5/t5-base checkpoints/t5-base
    python train.py --config configs/pubmed.py --workdir runs/pubmed_base_pipelined

The sequential baseline needs one more setting. T5-Large needs three, after a conversion in the same way:

    --set train.method=sequential
    --set train.init_from=checkpoints/t5-large --set train.remat=layers --set mesh.fsdp=2

T5-Base needs one card of 24 GB and T5-Large two, by estimate and in the paper (RTX 4090). The paper reports
ROUGE-1/2/L:

              trained as  dev             test            examples/s
    T5-Base   sequential  39.8/18.3/36.9  39.7/18.2/36.8  0.2
              pipelined   38.2/17.5/35.5  38.2/17.4/35.4  1.3 (6.5x)
    T5-Large  sequential  40.5/18.9/37.6  40.5/18.7/37.6  0.1
              pipelined   38.7/17.8/35.8  38.4/17.9/36.2  0.7 (7.0x)
"""

import runpy
from pathlib import Path

paper = runpy.run_path(str(Path(__file__).with_name("paper.py")))["paper"]

config = paper(
    "pubmed",
    steps=49_968,  # ten epochs of 119,924 examples
    time_max=256,
    sub_max=24,
    max_target=1024,
    max_length=1024,
    separator=" ",
    pack=1,  # three targets of this length in one sequence would not fit
)
