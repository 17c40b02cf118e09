"""PubMed: the paper's experiment, T5-Base with the pipelined decoder.

    python -m pipejax data prepare pubmed --manual-dir DIR     # without DIR it says which files it needs
    python -m pipejax convert from-hf google-t5/t5-base checkpoints/t5-base
    python train.py --config configs/pubmed.py --workdir runs/pubmed_base_pipelined

The sequential baseline takes one setting more, and T5-Large three, once it is converted in the same way:

    --set train.objective=sequential
    --set train.init_from=checkpoints/t5-large --set train.remat=layers --set mesh.fsdp=2

T5-Base needs one card of 24 GB and T5-Large two: by estimate, and in the paper (RTX 4090). The paper reports
ROUGE-1/2/L:

              trained as  dev             test            examples/s
    T5-Base   sequential  39.8/18.3/36.9  39.7/18.2/36.8  0.2
              pipelined   38.2/17.5/35.5  38.2/17.4/35.4  1.3 (6.5x)
    T5-Large  sequential  40.5/18.9/37.6  40.5/18.7/37.6  0.1
              pipelined   38.7/17.8/35.8  38.4/17.9/36.2  0.7 (7.0x)
"""

from pipejax.config import Config, DataConfig, DecodeConfig, GridConfig, TrainConfig

config = Config(
    name="pubmed",
    grid=GridConfig(delay=1, time_max=256, sub_max=24),  # the paper's 50 and 20 would cut off too much
    data=DataConfig(task="pubmed", max_source=2048, max_target=1024, separator=" "),
    train=TrainConfig(
        # From the paper (section 4.3): AdamW, its rate and batch, and ten epochs of 119,924 examples.
        steps=49_968,
        batch_size=24,
        learning_rate=1e-4,
        # The paper leaves these open.
        warmup_steps=1000,  # then the rate is constant
        weight_decay=0.01,  # as the same group's One2Branch has it for keyphrases
        dropout=0.1,  # as T5 itself was trained
        clip_norm=1.0,
        init_from="checkpoints/t5-base",
        evaluate_every=4_996,  # an epoch
        evaluate_examples=1000,
        checkpoint_every=1000,
        # What fits into 24 GB: six examples at a time, and all but matrix products is computed again for the gradient.
        accumulate=4,
        remat="dots",
        pack=1,  # three targets of this length in one row of slots would not fit
    ),
    decode=DecodeConfig(max_length=1024),
)
