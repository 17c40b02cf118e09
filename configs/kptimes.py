"""KPTimes: the paper's experiment, T5-Base with the pipelined decoder.

    python -m pipejax data prepare kptimes --manual-dir DIR     # without DIR it lists the files that it needs
    python -m pipejax convert from-hf google-t5/t5-base checkpoints/t5-base
    python train.py --config configs/kptimes.py --workdir runs/kptimes_base_pipelined

The sequential baseline needs one more setting. T5-Large needs three, after a conversion in the same way:

    --set train.method=sequential
    --set train.init_from=checkpoints/t5-large --set train.remat=layers --set mesh.fsdp=2

T5-Base needs one card of 24 GB and T5-Large two, by estimate and in the paper (RTX 4090). The paper reports
F1@5/F1@M of present and of absent keyphrases:

              trained as  present    absent     examples/s  memory
    T5-Base   sequential  33.7/51.0  24.2/33.0  3.4         1,534 M
              pipelined   32.2/50.8  22.8/33.4  8.4 (2.5x)  1,467 M
    T5-Large  sequential  34.8/51.8  24.7/34.1  1.8         3,944 M
              pipelined   32.6/51.6  22.8/34.0  4.4 (2.4x)  3,814 M
"""

import runpy
from pathlib import Path

paper = runpy.run_path(str(Path(__file__).with_name("paper.py")))["paper"]

config = paper("kptimes", steps=108_301)  # ten epochs of 259,923 examples
