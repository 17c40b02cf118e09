"""MultiSpanQA: the paper's experiment, T5-Base with the pipelined decoder.

    python -m pipejax data prepare msqa --manual-dir DIR     # without DIR it says which files it needs
    python -m pipejax convert from-hf google-t5/t5-base checkpoints/t5-base
    python train.py --config configs/msqa.py --workdir runs/msqa_base_pipelined

The sequential baseline takes one setting more, and T5-Large three, once it is converted in the same way:

    --set train.objective=sequential
    --set train.init_from=checkpoints/t5-large --set train.remat=layers --set mesh.fsdp=2

T5-Base needs one card of 24 GB and T5-Large two: by estimate, and in the paper (RTX 4090). The paper reports
exact-match F1 / partial-match F1:

              trained as  dev        test       examples/s  memory
    T5-Base   sequential  72.2/84.8  72.3/84.9  5.4         1,802 M
              pipelined   72.5/85.2  71.5/84.3  9.3 (1.7x)  1,798 M
    T5-Large  sequential  75.5/87.3  74.7/87.3  3.1         3,713 M
              pipelined   75.0/87.2  74.0/87.1  5.3 (1.7x)  3,710 M
"""

from pipejax.config import Config, DataConfig, DecodeConfig, GridConfig, TrainConfig

config = Config(
    name="msqa",
    grid=GridConfig(delay=1, time_max=50, sub_max=20),  # the paper's
    data=DataConfig(task="msqa", max_source=2048, max_target=256, separator="; "),
    train=TrainConfig(
        # From the paper (section 4.3): AdamW, its rate and batch, and ten epochs of 4,577 examples.
        steps=1_907,
        batch_size=24,
        learning_rate=1e-4,
        # The paper leaves these open.
        warmup_steps=95,  # then the rate is constant
        weight_decay=0.001,  # as the same group's One2Branch has it for answers
        dropout=0.1,  # as T5 itself was trained
        clip_norm=1.0,
        init_from="checkpoints/t5-base",
        evaluate_every=190,  # an epoch
        evaluate_examples=1000,
        checkpoint_every=190,
        # What fits into 24 GB: six examples at a time, and all but matrix products is computed again for the gradient.
        accumulate=4,
        remat="dots",
    ),
    decode=DecodeConfig(max_length=128),
)
