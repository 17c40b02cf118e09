"""KP20k: the paper's experiment, T5-Base with the pipelined decoder.

    python -m pipejax data prepare kp20k --manual-dir DIR     # without DIR it says which files it needs
    python -m pipejax convert from-hf google-t5/t5-base checkpoints/t5-base
    python train.py --config configs/kp20k.py --workdir runs/kp20k_base_pipelined

The sequential baseline takes one setting more, and T5-Large three, once it is converted in the same way:

    --set train.objective=sequential
    --set train.init_from=checkpoints/t5-large --set train.remat=layers --set mesh.fsdp=2

T5-Base needs one card of 24 GB and T5-Large two: by estimate, and in the paper (RTX 4090). The paper reports
F1@5/F1@M of present and of absent keyphrases:

              trained as  present    absent   examples/s  memory
    T5-Base   sequential  33.7/39.2  2.2/4.2  2.5         1,714 M
              pipelined   27.8/40.1  4.0/7.6  5.1 (2.0x)  1,634 M
    T5-Large  sequential  33.0/40.5  2.1/4.1  1.6         3,972 M
              pipelined   28.6/41.4  3.9/7.5  3.2 (2.0x)  3,813 M
"""

from pipejax.config import Config, DataConfig, DecodeConfig, GridConfig, TrainConfig

config = Config(
    name="kp20k",
    grid=GridConfig(delay=1, time_max=50, sub_max=20),  # the paper's
    data=DataConfig(task="kp20k", max_source=2048, max_target=256, separator="; "),
    train=TrainConfig(
        # From the paper (section 4.3): AdamW, its rate and batch, and ten epochs of 509,818 examples.
        steps=212_424,
        batch_size=24,
        learning_rate=1e-4,
        # The paper leaves these open.
        warmup_steps=1000,  # then the rate is constant
        weight_decay=0.01,  # as the same group's One2Branch has it for keyphrases
        dropout=0.1,  # as T5 itself was trained
        clip_norm=1.0,
        init_from="checkpoints/t5-base",
        evaluate_every=21_242,  # an epoch
        evaluate_examples=1000,
        checkpoint_every=1000,
        # What fits into 24 GB: six examples at a time, and all but matrix products is computed again for the gradient.
        accumulate=4,
        remat="dots",
    ),
    decode=DecodeConfig(max_length=128),
)
