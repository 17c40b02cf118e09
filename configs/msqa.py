"""MultiSpanQA: the paper's experiment, T5-Base with the pipelined decoder.

    python -m pipejax data prepare msqa --manual-dir DIR     # without DIR it lists the files that it needs
    python -m pipejax convert from-hf google-t5/t5-base checkpoints/t5-base
    python train.py --config configs/msqa.py --workdir runs/msqa_base_pipelined

The sequential baseline needs one more setting. T5-Large needs three, after a conversion in the same way:

    --set train.method=sequential
    --set train.init_from=checkpoints/t5-large --set train.remat=layers --set mesh.fsdp=2

T5-Base needs one card of 24 GB and T5-Large two, by estimate and in the paper (RTX 4090). The paper reports
exact-match F1 / partial-match F1:

              trained as  dev        test       examples/s  memory
    T5-Base   sequential  72.2/84.8  72.3/84.9  5.4         1,802 M
              pipelined   72.5/85.2  71.5/84.3  9.3 (1.7x)  1,798 M
    T5-Large  sequential  75.5/87.3  74.7/87.3  3.1         3,713 M
              pipelined   75.0/87.2  74.0/87.1  5.3 (1.7x)  3,710 M
"""

import runpy
from pathlib import Path

paper = runpy.run_path(str(Path(__file__).with_name("paper.py")))["paper"]

config = paper(
    "msqa",
    steps=1_907,  # ten epochs of 4,577 examples
    warmup_steps=95,
    weight_decay=0.001,  # as in One2Branch, by the same group, for answers
    checkpoint_every=190,
)
