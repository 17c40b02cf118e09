"""The common settings of the paper's experiments (section 4.3); each config states the changes for its task."""

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
    """The config of T5-Base with the pipelined decoder: AdamW with the paper's rate and batch, for ten epochs.

    Args:
      task: the name of the task.
      steps: the number of updates in ten epochs.
      warmup_steps: the updates of the warm-up, which the paper does not state; after it the rate is constant.
      weight_decay: not stated either; the default is the value of One2Branch, by the same group, for keyphrases.
      checkpoint_every: steps between checkpoints.
      time_max: most time-steps. The paper has 50, which would truncate many summaries and long answers.
      sub_max: most rows. The paper has 20.
      max_target: most tokens of a target.
      max_length: most tokens of a sequential answer.
      separator: the text between the rows of a sequential answer.
      pack: most targets in one sequence of slots; 0: chosen automatically.
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
            dropout=0.1,  # as in the training of T5
            clip_norm=1.0,
            init_from="checkpoints/t5-base",
            evaluate_every=steps // 10,  # once for each epoch
            evaluate_examples=1000,
            checkpoint_every=checkpoint_every,
            # To fit in 24 GB: six examples at a time, and everything except matrix products is computed again.
            accumulate=4,
            remat="dots",
            pack=pack,
        ),
        decode=DecodeConfig(max_length=max_length),
    )
