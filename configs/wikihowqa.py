"""WikiHowQA: the paper's experiment, T5-Base with the pipelined decoder.

    python -m pipejax data prepare wikihowqa --manual-dir DIR     # without DIR it lists the files that it needs
    python -m pipejax convert from-hf google-t5/t5-base checkpoints/t5-base
    python train.py --config configs/wikihowqa.py --workdir runs/wikihowqa_base_pipelined

The sequential baseline needs one more setting. T5-Large needs three, after a conversion in the same way:

    --set train.method=sequential
    --set train.init_from=checkpoints/t5-large --set train.remat=layers --set mesh.fsdp=2

T5-Base needs one card of 24 GB and T5-Large two, by estimate and in the paper (RTX 4090). The paper reports
ROUGE-1/2/L:

              trained as  dev             test            examples/s
    T5-Base   sequential  39.5/16.7/38.3  35.9/14.1/34.9  0.8
              pipelined   39.2/16.6/38.0  35.7/13.9/34.6  4.6 (5.8x)
    T5-Large  sequential  41.2/18.5/40.1  37.8/15.7/36.7  0.5
              pipelined   40.9/18.4/39.7  37.3/15.6/36.2  2.6 (5.2x)
"""

import runpy
from pathlib import Path

paper = runpy.run_path(str(Path(__file__).with_name("paper.py")))["paper"]

config = paper(
    "wikihowqa",
    steps=53_750,  # ten epochs of the 129 thousand examples
    time_max=128,
    sub_max=40,
    max_target=1024,
    max_length=768,
    separator=" ",
    pack=1,  # three targets of this length in one sequence would not fit
)
