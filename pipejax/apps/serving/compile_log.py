"""Logs the reasons for which programs are compiled while a request waits for these programs."""

import logging
from collections.abc import Hashable, Iterable

from pipejax.apps.serving.answer import Answer
from pipejax.inference.running_batch import StepKind, Steps
from pipejax.system.compiled import Needs

logger = logging.getLogger(__name__)

KINDS = {
    StepKind.TOKENS: "answers without sampling and scores",
    StepKind.LOGITS: "sampling or scores",
    StepKind.REPETITION: "repetition_penalty or no_repeat_ngram_size",
}


class CompileLog:
    """Logs a line for each request that waits for programs, unless all these programs were logged before."""

    def __init__(self) -> None:
        """Creates a log without lines."""
        self._logged = set[Hashable]()  # the keys of needs

    def note(self, answer: Answer, needs: Needs, compiled: Iterable[Hashable]) -> None:
        """Logs why an answer needs programs that are not compiled, unless the reason was logged before.

        Args:
          answer: the answer that waits.
          needs: the programs to compile.
          compiled: the keys of all programs that are compiled.
        """
        if needs.keys() <= self._logged:
            return
        # A list, because a set would call `__hash__` of the keys, which is Python, while another thread adds keys.
        causes = causes_of(answer, needs, [*self._logged, *compiled])
        self._logged |= needs.keys()
        logger.info(f"compiling because of {' and '.join(causes)}; one request waits, others continue")


def causes_of(answer: Answer, needs: Needs, known: Iterable[Hashable]) -> list[str]:
    """Returns the reasons why an answer needs programs that are not compiled, in words for the log.

    Args:
      answer: the answer.
      needs: the programs to compile.
      known: the keys of programs that are compiled or were logged.
    """
    steps = [key for key in known if isinstance(key, Steps)]
    prompt = f"a prompt of {len(answer.generator.ids_of(answer.request.source))} tokens"
    causes = dict[str, None]()
    for key in needs:
        if not isinstance(key, Steps):
            continue
        before = [one for one in steps if one.strategy == key.strategy]
        features = _features(key, prompt)
        if not before:
            causes |= dict.fromkeys([f"the first request for {answer.kind.method.label}", prompt])
            shown = [name for name in ("kind", "answer_format") if getattr(key, name)]
        else:
            shown = [name for name in features if getattr(key, name) not in {getattr(x, name) for x in before}]
            # Each part of the key is known, but this combination of parts is new.
            shown = shown or ["length", *(name for name in ("kind", "answer_format") if getattr(key, name))]
        causes |= dict.fromkeys(features[name] for name in shown)
    return [*causes] or [prompt]


def _features(key: Steps, prompt: str) -> dict[str, str]:
    """Returns descriptions of the parts of a key, by the names of its fields."""
    return {
        "length": prompt,
        "slots": f"an answer that needs a larger cache ({key.slots} tokens)",
        "kind": KINDS[key.kind],
        "answer_format": key.answer_format or "answers without a schema",
        "places": "a request without others" if key.places == 1 else "requests side by side",
    }
