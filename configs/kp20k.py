"""KP20k: the paper's experiment, T5-Base with the pipelined decoder.

    python -m pipejax data prepare kp20k --manual-dir DIR     # without DIR it lists the files that it needs
    python -m pipejax convert from-hf google-t5/t5-base checkpoints/t5-base
    python train.py --config configs/kp20k.py --workdir runs/kp20k_base_pipelined

The sequential baseline needs one more setting. T5-Large needs three, after a conversion in the same way:

    --set train.method=sequential
    --set train.init_from=checkpoints/t5-large --set train.remat=layers --set mesh.fsdp=2

T5-Base needs one card of 24 GB and T5-Large two, by estimate and in the paper (RTX 4090). The paper reports
F1@5/F1@M of present and of absent keyphrases:

              trained as  present    absent   examples/s  memory
    T5-Base   sequential  33.7/39.2  2.2/4.2  2.5         1,714 M
              pipelined   27.8/40.1  4.0/7.6  5.1 (2.0x)  1,634 M
    T5-Large  sequential  33.0/40.5  2.1/4.1  1.6         3,972 M
              pipelined   28.6/41.4  3.9/7.5  3.2 (2.0x)  3,813 M
"""

import runpy
from pathlib import Path

paper = runpy.run_path(str(Path(__file__).with_name("paper.py")))["paper"]

config = paper("kp20k", steps=212_424)  # ten epochs of 509,818 examples
