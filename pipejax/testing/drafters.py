"""Checks a drafter: its members and shapes, and that its drafts change no answer."""

from functools import partial
from typing import Any

import numpy as np

from pipejax import methods
from pipejax.config import Config, DecodeConfig, GridConfig
from pipejax.decoding import Drafter, drafters
from pipejax.inference.drafter_parameters import OpenDrafter
from pipejax.inference.generator import Generator
from pipejax.model.backbone import Backbone
from pipejax.system import Tree
from pipejax.testing.answers import Records, compare_records, stream
from pipejax.testing.recomputation import LONGEST, TOY, draw_ids, random_params

# The settings of the decodes: a delay (None: sequential), the stop, and the ways to decode beside a batch. Each way
# compiles programs.
SETTINGS: tuple[tuple[int | None, str, tuple[str, ...]], ...] = (
    (0, "empty_row", ()),
    (1, "empty_row", ("alone", "stream")),
    (2, "literal", ()),
    (3, "empty_row", ()),
    (None, "empty_row", ("stream",)),
)


def check_drafter(drafter: Drafter, *, model: Backbone = TOY, parameters: Tree = None, sources: int = 8) -> str:
    """Checks a drafter: its members and shapes, and that its drafts change no answer.

    The pipelined decoder with delays of 0 to 3 and with both stops, and the sequential decoder, write answers with the
    drafter's drafts. They decode sources in a batch and, with some of these settings, one source alone or a batch whose
    sources come and go, as in a server. The answers are compared with a full recomputation without drafts.

    Args:
      drafter: the drafter.
      model: the backbone, if the drafter needs another one than the toy.
      parameters: the drafter's parameters, in the form that its `load` returns; None: the drafter has none.
      sources: the number of random sources to decode.

    Returns:
      A line that summarises the number of compared answers, and of calls and time-steps.

    Raises:
      UserError: the drafter breaks a rule. The message names the part, the result and the expected result.
    """
    drafters.check_members(drafter)
    rng, params = np.random.default_rng(0), random_params(model, model.eos_token_id)
    drawn = [[*draw_ids(rng, model, LONGEST - 1), model.eos_token_id] for _ in range(sources)]
    compared, calls, steps = 0, 0, 0
    for delay, stop, ways in SETTINGS:
        config = Config(
            model=model,
            grid=GridConfig(delay=delay or 0, time_max=12, sub_max=3, stop=stop),
            decode=DecodeConfig(max_length=12, draft_tokens=2),
        )
        method = methods.make("sequential" if delay is None else "pipelined", config)
        generator = Generator(config, params, None, drafter=OpenDrafter(drafter, params=parameters))
        given: list[dict[str, Any]] = [{"source_ids": ids} for ids in drawn]
        if delay == 0:  # rows that start together need prefixes
            given = [record | {"row_prefixes": [[3], [4]]} for record in given]
        checked = [generator.source(record, "source", i) for i, record in enumerate(given)]
        decode = partial(generator.decode, given, method=method.name, drafter=drafter)
        name, batched = "drafts of one row" if delay is None else f"drafts, delay {delay}", decode(batch_size=2)
        runs: Records = {f"{name}, in a batch": [*batched]}
        calls += sum(record["calls"] for record in batched)
        steps += sum(record["steps"] for record in batched)
        if "alone" in ways:
            runs[f"{name}, alone"] = [*decode(batch_size=1)]
        if "stream" in ways:
            strategy = generator.make_strategy(method.name, drafter)
            runs[f"{name}, in a stream"] = stream(generator, method, checked, strategy=strategy)
        compared += compare_records(model, params, method, checked, runs, drafter)
    return f"{type(drafter).__name__}: {compared} answers do not change; {calls} calls for {steps} steps"
