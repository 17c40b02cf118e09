"""The settings of the paper's experiments (section 4.3), and what stands in for those that it leaves open."""

from pipejax.config import Config, DataConfig, DecodeConfig, MeshConfig, TrainConfig
from pipejax.data import PUBLISHED
from pipejax.system.errors import UserError

EPOCHS, BATCH_SIZE, MAX_SOURCE = 10, 24, 2048
SIZES = ("base", "large")


def paper(task: str, *, size: str, objective: str, train_examples: int, init_from: str = "") -> Config:
    """The config of one experiment of the paper.

    From the paper: AdamW, its rate, batch and source length; Δt = 1; ten epochs, made steps here; T5-Base on one card
    of 24 GB and T5-Large on two. The grid's bounds are the task's: the paper's 50 and 20 where little is cut by them.
    Not from the paper: a short warm-up to a constant rate; weight decay of 0.001 for answers and 0.01 for the rest, as
    in earlier code of the same group; dropout 0.1, T5's own; gradients clipped at norm 1.

    Args:
      task: a published data set.
      size: "base" or "large": what checkpoint to start from, and how the work is laid over cards.
      objective: "pipelined" or "sequential".
      train_examples: of the train split; an epoch has that many divided by the batch.
      init_from: a converted checkpoint; "": checkpoints/t5-SIZE.
    """
    if size not in SIZES:
        raise UserError(f"size: found {size!r}; expected one of {', '.join(SIZES)}")
    published = PUBLISHED[task]
    steps = EPOCHS * train_examples // BATCH_SIZE
    epoch = steps // EPOCHS
    return Config(
        name=f"{task}_{size}_{objective}",
        grid=published.grid,
        data=DataConfig(
            task=task, max_source=MAX_SOURCE, max_target=published.max_target, separator=published.separator
        ),
        train=TrainConfig(
            objective=objective,
            steps=steps,
            batch_size=BATCH_SIZE,
            accumulate=4,  # six examples at a time, with `remat` what fits into 24 GB at 2,048 tokens
            pack=1 if published.max_target > 512 else 0,  # three long targets in one row of slots would not fit
            remat={"base": "dots", "large": "layers"}[size],
            learning_rate=1e-4,
            warmup_steps=min(steps // 20, 1000),
            weight_decay=0.001 if published.metric == "spans" else 0.01,
            init_from=init_from or f"checkpoints/t5-{size}",
            evaluate_every=epoch,
            evaluate_examples=1000,
            checkpoint_every=min(epoch, 1000),
        ),
        decode=DecodeConfig(max_length=published.max_length),
        mesh=MeshConfig(fsdp=2 if size == "large" else 1),
    )


def scratch(task: str, *, steps: int, max_source: int) -> Config:
    """A published task for a T5 that was pretrained where no other can be had, to compare objectives without a GPU.

    All of this is our own choice: 3.6 million parameters, from `python -m experiments.pretraining`, and batches of 16.

    Args:
      task: a published data set.
      steps: of training.
      max_source: tokens; what lies beyond is cut.
    """
    published = PUBLISHED[task]
    return Config(
        name=f"{task}_scratch",
        grid=published.grid,
        data=DataConfig(
            task=task,
            max_source=max_source,
            max_target=published.max_target,
            separator=published.separator,
            metric=published.metric,  # where the data are lines of one's own
        ),
        train=TrainConfig(
            steps=steps,
            batch_size=16,
            length_group=1,  # in so few steps compiling more lengths would cost more than padding
            learning_rate=5e-4,
            schedule="linear",
            warmup_steps=steps // 20,
            beta2=0.98,
            weight_decay=0.01,
            init_from="runs/copying/run",
            evaluate_every=steps // 4,
            evaluate_examples=200,
            checkpoint_every=steps // 4,
        ),
        decode=DecodeConfig(max_length=published.max_length),
    )
