"""The start of a run: from its newest intact step, from the weights of another run, or from random weights."""

import dataclasses
import hashlib
import logging
import uuid
from collections.abc import Mapping
from pathlib import Path

from pipejax import checkpoint, methods
from pipejax.checkpoint import Restored, Store
from pipejax.checkpoint.fingerprint import digest
from pipejax.config import Config, TrainConfig
from pipejax.data import make_task
from pipejax.data.shapes import Shapes
from pipejax.data.tokenizer import Tokenizer, check_special_ids, warn_of_start
from pipejax.model import dropout
from pipejax.system import Tree, distributed
from pipejax.system.errors import UserError
from pipejax.training.memory import choose_remat, device_memory
from pipejax.training.optimizer import warmup
from pipejax.training.run_directory import RunDirectory, check_places, check_resume, choose_end, resolve_model
from pipejax.training.step import Trainer, TrainState, state_of

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class Start:
    """The state from which training continues."""

    trainer: Trainer
    state: TrainState
    step: int  # the number of updates already made
    tokenizer: Tokenizer
    # The config of the run so far; None: the run is new. Its steps and intervals may differ from the new ones.
    before: Config | None = None
    shapes: Shapes | None = None  # the batch shapes of the run so far; None: not chosen yet
    # Fingerprint of the weights that the run began with; "": random weights, or a run of an older release.
    init: str = ""
    conversion: int | None = None  # version of the conversion of those weights; None: unknown
    # The id of the run for experiment trackers.
    run: str = dataclasses.field(default_factory=lambda: distributed.same(uuid.uuid4().hex[:16]))


def start_run(config: Config, directory: RunDirectory, store: Store, data: Mapping[str, str]) -> Start:
    """Returns the run's newest intact step, else the weights of `train.init_from`, else random weights.

    The choice is logged.

    Raises:
      UserError: the config or the data differ from the run's in a way that resume does not allow, or the starting
        checkpoint or the tokenizer cannot be used.
    """
    config = choose_end(config)
    trainers: list[Trainer] = []  # empty until a checkpoint's config is read; then one trainer

    def expect(saved: Config) -> dict[str, Tree]:
        wanted = as_begun(config, saved, directory.path)
        if not trainers:
            trainers.append(Trainer(wanted))
        return trainers[0].templates()

    had_steps = distributed.same(bool(store.steps()))
    own = store.newest(expect, set_aside=True)
    if own is not None:
        return _resume(trainers[0], own, directory, data)
    if had_steps:
        logger.warning(f"{store.directory}: found no intact step; training starts again from the beginning")
    memory = distributed.same(device_memory())
    with distributed.fail_together(UserError):
        trainer, tokenizer, origin = _prepare_trainer(config, memory)
    state = trainer.fresh(origin.items["params"] if origin else None)
    if origin is None:
        logger.info(f"starting from random weights (seed {config.train.seed})")
        return Start(trainer, state, 0, tokenizer)
    step = f"{'best ' if config.train.init_best else ''}step {origin.step}"
    logger.info(f"starting from {config.train.init_from} ({step})")
    conversion = origin.metadata.get("conversion")
    return Start(trainer, state, 0, tokenizer, init=digest(origin.arrays["params"]), conversion=conversion)


def as_begun(config: Config, saved: Config, where: Path) -> Config:
    """Returns the config of a resumed run, with the values that were determined when the run began.

    These are the model, the resolved `data.special_tokens` and the resolved `train.remat`.

    Raises:
      UserError: a setting that must not change on resume has changed.
    """
    wanted = config if config.model is not None else dataclasses.replace(config, model=saved.model)
    wanted = _with_special_tokens(wanted, saved.data.special_tokens)
    if wanted.train.remat == "auto":
        wanted = dataclasses.replace(wanted, train=dataclasses.replace(wanted.train, remat=saved.train.remat))
    check_resume(saved, wanted, where)
    return wanted


def _with_special_tokens(config: Config, found: str) -> Config:
    """Returns the config with `data.special_tokens` set to `found` if it is "auto"."""
    if config.data.special_tokens != "auto":
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, special_tokens=found))


def _resume(trainer: Trainer, own: Restored, directory: RunDirectory, data: Mapping[str, str]) -> Start:
    """Returns the state of a restored checkpoint, after checking that data, places and dropout masks still match."""
    wanted, before = trainer.config.train, own.config.train
    if before.evaluate_examples != wanted.evaluate_examples:
        logger.info(
            "train.evaluate_examples: found a different number than before; best/ compares scores of different examples"
        )
    if before.steps != wanted.steps and wanted.schedule != "constant":
        logger.info(f"train.steps: {before.steps} -> {wanted.steps}; the {wanted.schedule} schedule now ends there")
    ends = warmup(before), warmup(wanted)
    if ends[0] != ends[1] and own.step < max(ends):
        logger.info(f"train.warmup_share: the warm-up now ends at step {ends[1]} instead of {ends[0]}")
    with distributed.fail_together(UserError):
        if any(own.metadata.get(name, known) != known for name, known in data.items() if name != "dev"):
            raise UserError(
                f"{directory.path}: data.train",
                found="examples that differ from the run's so far",
                expected="the same examples on resume; use another directory for another experiment",
            )
        check_places(own, trainer.config, data, directory.path)
        _check_dropout(own, wanted, directory.path)
    as_many = before.evaluate_examples == wanted.evaluate_examples
    if as_many and own.metadata.get("dev", data["dev"]) != data["dev"]:
        logger.warning(
            "data.dev: found examples that differ from before; best/ compares scores of old and new examples"
        )
    logger.info(f"resuming at step {own.step} ({own.path})")
    with distributed.fail_together(UserError):
        tokenizer = checkpoint.tokenizer_of(own) or Tokenizer.load(directory.path / "tokenizer")
    shapes = Shapes.from_json(own.metadata["shapes"]) if "shapes" in own.metadata else None
    # Runs of older releases derived the id from the path.
    by_place = hashlib.sha256(str(directory.path).encode()).hexdigest()[:16]
    init, run = str(own.metadata.get("init", "")), str(own.metadata.get("run", by_place))
    state = state_of(own.items)
    checkpoint.report_conversion(own)
    return Start(trainer, state, own.step, tokenizer, own.config, shapes, init, own.metadata.get("conversion"), run)


def _check_dropout(own: Restored, train: TrainConfig, where: Path) -> None:
    """Raises a UserError if the run began with other dropout masks, unless `train.new_dropout` is set."""
    if not train.dropout or own.step >= train.steps or own.metadata.get("dropout", 1) == dropout.VERSION:
        return
    if not train.new_dropout:
        raise UserError(
            f"{where}: train.dropout",
            "the run was started with an older release, whose dropout masks differ",
            expected="train.new_dropout=true, to continue with the masks of this release",
        )
    logger.warning(f"train.new_dropout: from step {own.step + 1} on the run uses the dropout masks of this release")


def _check_frozen(config: Config, learned: Config) -> None:
    """Raises a UserError unless a frozen model has the method and the settings with which it was trained."""
    if lines := methods.training_mismatches(methods.default(config), config, learned):
        expected = "the method and the grid with which the frozen model was trained"
        raise UserError("train.freeze", found="backbone, with other settings", expected=expected, hint=lines[0])


def _prepare_trainer(config: Config, memory: int | None = None) -> tuple[Trainer, Tokenizer, Restored | None]:
    """Returns the trainer and the tokenizer of a new run, and the checkpoint of `train.init_from`, if set."""
    origin: Restored | None = None
    if config.train.init_from:
        origin = checkpoint.open_run(config.train.init_from, best=config.train.init_best)
        config = _with_special_tokens(resolve_model(config, origin.config), origin.config.data.special_tokens)
        if config.train.freeze == "backbone" and origin.config.train.method != "none":
            _check_frozen(config, origin.config)
    elif config.auxiliary is not None:
        raise UserError(
            "auxiliary",
            found="auxiliary parameters without train.init_from",
            expected="train.init_from with the checkpoint of the model for which the auxiliary parameters are trained",
        )
    elif config.train.lora_rank:
        raise UserError(
            "train.lora_rank",
            found=f"{config.train.lora_rank} without train.init_from",
            expected="train.init_from with the checkpoint to adapt, or 0",
        )
    elif config.model is None:
        raise UserError(
            "model", found="none", expected="`model=T5Config(...)` in the config or train.init_from=CHECKPOINT"
        )
    config = _with_special_tokens(config, "template")
    tokenizer = _find_tokenizer(config, origin)
    assert config.model is not None
    if tokenizer.size > config.model.vocab_size:
        raise UserError(
            "model.vocab_size",
            found=f"{config.model.vocab_size}",
            expected=f"at least {tokenizer.size}, the size of the tokenizer",
        )
    methods.trained(config).check_text(tokenizer)
    return Trainer(choose_remat(config, memory)), tokenizer, origin


def _find_tokenizer(config: Config, origin: Restored | None) -> Tokenizer:
    """Returns the tokenizer of the config or its task, else the one of the starting checkpoint.

    Raises:
      UserError: there is no tokenizer, or it does not fit the starting checkpoint.
    """
    chosen, name = None, f"data.tokenizer={config.data.tokenizer}"
    if config.data.tokenizer:
        chosen = Tokenizer.load(config.data.tokenizer)
    elif chosen := make_task(config.data).tokenizer():
        name = f"the tokenizer of data.task={config.data.task}"
    own: Tokenizer | None = None
    try:
        own = checkpoint.tokenizer_of(origin) if origin else None
    except UserError as error:
        if chosen is None:
            raise
        logger.warning(f"{error}; {name} is used without a comparison")
    if chosen is None:
        if own is None:
            raise UserError(
                "data.tokenizer",
                found="none",
                expected="a directory of tokenizer files",
                hint=f"{config.train.init_from} has none" if config.train.init_from else "",
            )
        return own
    same = own is not None and _compare_pieces(chosen, own, name, config)
    place = f"{config.train.init_from}: model" if origin else "model"
    assert config.model is not None
    check_special_ids(
        chosen,
        config.model,
        f"{place}.eos_token_id",
        name,
        trained=same and origin is not None and origin.config.train.method != "none",
    )
    warn_of_start(chosen, config.model, f"{place}.decoder_start_token_id", name)
    return chosen


def _compare_pieces(chosen: Tokenizer, own: Tokenizer, name: str, config: Config) -> bool:
    """Returns whether every id means the same piece as in the tokenizer of the starting checkpoint.

    Raises:
      UserError: an id means another piece, and `data.new_tokenizer` is not set.
    """
    if not (others := chosen.other_pieces(own)):
        return True
    first, start = others[0], config.train.init_from
    found = f"{len(others)} of its {chosen.size} ids stand for other pieces than in the tokenizer of {start}"
    found += f" ({first}: {chosen.piece(first)!r}, there {own.piece(first)!r})"
    if not config.data.new_tokenizer:
        raise UserError(
            name,
            found,
            expected="the tokenizer of that checkpoint, or data.new_tokenizer=true to train with another tokenizer",
        )
    kept = "train.freeze" if config.train.freeze != "none" else "train.lora_rank" if config.train.lora_rank else ""
    learned = f", but {kept} leaves the table unchanged" if kept else ""
    logger.warning(f"{name}: {found}; their embeddings must be learned again{learned}")
    return False
