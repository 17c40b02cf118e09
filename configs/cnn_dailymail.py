"""CNN/DailyMail: the paper's experiment, T5-Base with the pipelined decoder.

    python -m pipejax data prepare cnn_dailymail --manual-dir DIR     # without DIR it lists the files that it needs
    python -m pipejax convert from-hf google-t5/t5-base checkpoints/t5-base
    python train.py --config configs/cnn_dailymail.py --workdir runs/cnn_dailymail_base_pipelined

The sequential baseline needs one more setting. T5-Large needs three, after a conversion in the same way:

    --set train.method=sequential
    --set train.init_from=checkpoints/t5-large --set train.remat=layers --set mesh.fsdp=2

T5-Base needs one card of 24 GB and T5-Large two, by estimate and in the paper (RTX 4090). The paper reports
ROUGE-1/2/L:

              trained as  dev             test            examples/s
    T5-Base   sequential  39.6/17.8/37.5  39.2/17.4/37.1  1.2
              pipelined   38.4/17.2/36.4  37.8/16.6/35.8  2.9 (2.4x)
    T5-Large  sequential  39.6/17.8/37.5  39.2/17.4/37.1  0.7
              pipelined   38.5/17.5/36.5  38.0/17.0/36.0  1.6 (2.3x)

In the paper the sequential T5-Large has exactly the scores of T5-Base, which is suspect.
"""

import runpy
from pathlib import Path

paper = runpy.run_path(str(Path(__file__).with_name("paper.py")))["paper"]

config = paper(
    "cnn_dailymail",
    steps=119_630,  # ten epochs of 287,113 examples
    time_max=96,
    max_target=512,
    max_length=256,
    separator=" ",
)
