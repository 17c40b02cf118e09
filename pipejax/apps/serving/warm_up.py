"""The programs that a server compiles before a request needs them."""

import itertools
from collections.abc import Callable, Mapping

from pipejax.apps.serving.answer import Kind, kind_of
from pipejax.apps.serving.compiler import LAST, LATER, PLANNED
from pipejax.apps.serving.lanes import Lanes
from pipejax.data.shapes import bucket, memory_length
from pipejax.decoding import Sampling
from pipejax.inference.generator import Generator
from pipejax.inference.running_batch import StepKind
from pipejax.inference.sources import Source
from pipejax.system.compiled import Needs
from pipejax.system.errors import UserError

Ask = Callable[[Needs, int], None]  # see `Compiler.ask`


def plan(
    ask: Ask,
    generator: Generator,
    kinds: Mapping[Kind, Generator],
    lanes: Lanes,
    *,
    places: int,
    length: int,
    schemas: bool = False,
) -> None:
    """Requests the programs of the default method, for prompts of up to `length` tokens.

    Args:
      ask: takes the programs, and their place in the order of compilation.
      generator: the model.
      kinds: the kinds of requests to the default methods, with a generator of each kind.
      lanes: creates batches.
      places: the number of places of a batch for several requests; a single request has a batch with one place.
      length: the most tokens of a prompt.
      schemas: whether to request the programs for common schemas as well, at the end.
    """
    lengths = sorted({bucket(n) for n in range(1, length + 1)})
    sizes = [*dict.fromkeys((places, 1))]
    for (kind, own), size in itertools.product(kinds.items(), sizes):
        batch = lanes.new_batch(kind, size, Source("", [1]))
        step_kinds = {StepKind.TOKENS, StepKind(bool(kind.method.can & {"sample", "score"}))}
        step_kinds.add(StepKind.of(Sampling.of(own.config.decode, 0), log_probs=False))
        for i, slots in enumerate(batch.cache_sizes):
            order = LAST if i else PLANNED if size == places else LATER  # the first cache size suffices for any prompt
            for one, n in itertools.product(sorted(step_kinds), lengths):  # for all lengths, steps without logits first
                source = None if one else n  # the encoder is requested with the answers without logits
                ask(batch.needs_of(source, memory_length(n), slots, {one}, own.adapter), order)
    if not (schemas and generator.tokenizer):
        return
    usual = generator.formats("schema").usual(generator.architecture.vocab_size)
    source_of_usual = Source("", [1], answer_format=usual)
    for own, size in itertools.product(kinds.values(), sizes):
        try:
            kind = kind_of(own, own.default_method, drafts=False)
            usual.check(kind.method, own.config)
            batch = lanes.new_batch(kind, size, source_of_usual)
        except UserError:  # answers of this model cannot follow schemas
            continue
        for one, n in itertools.product((StepKind.TOKENS, StepKind.LOGITS), lengths):
            ask(batch.needs_of(n, memory_length(n), batch.cache_sizes[0], {one}, own.adapter), LAST)
