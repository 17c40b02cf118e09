"""What the configs of the paper's experiments have in common (section 4.3); each of them says what its task changes."""

from pipejax.config import Config, DataConfig, DecodeConfig, GridConfig, TrainConfig


def paper(
    task: str,
    *,
    steps: int,
    warmup_steps: int = 1000,
    weight_decay: float = 0.01,
    checkpoint_every: int = 1000,
    time_max: int = 50,
    sub_max: int = 20,
    max_target: int = 256,
    max_length: int = 128,
    separator: str = "; ",
    pack: int = 0,
) -> Config:
    """T5-Base with the pipelined decoder: AdamW, its rate and batch, and ten epochs, which are `steps` updates.

    Args:
      task: its name.
      steps: ten epochs.
      warmup_steps: the paper leaves them open; then the rate is constant.
      weight_decay: left open, too; the default is what the same group's One2Branch has for keyphrases.
      checkpoint_every: steps.
      time_max: 50 is the paper's, which would cut off too much of summaries and long answers.
      sub_max: 20 is the paper's.
      max_target: tokens of a target.
      max_length: tokens of a sequential answer.
      separator: between the rows of a sequential answer.
      pack: targets in one row of slots, at the most; 0 chooses.
    """
    return Config(
        name=task,
        grid=GridConfig(delay=1, time_max=time_max, sub_max=sub_max),
        data=DataConfig(task=task, max_source=2048, max_target=max_target, separator=separator),
        train=TrainConfig(
            steps=steps,
            batch_size=24,
            learning_rate=1e-4,
            warmup_steps=warmup_steps,
            weight_decay=weight_decay,
            dropout=0.1,  # as T5 itself was trained
            clip_norm=1.0,
            init_from="checkpoints/t5-base",
            evaluate_every=steps // 10,  # an epoch
            evaluate_examples=1000,
            checkpoint_every=checkpoint_every,
            # What fits into 24 GB: six examples at a time; all but matrix products is computed again for the gradient.
            accumulate=4,
            remat="dots",
            pack=pack,
        ),
        decode=DecodeConfig(max_length=max_length),
    )
