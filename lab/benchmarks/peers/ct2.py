"""CTranslate2 as a peer: greedy decoding with float32 or int8 weights."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from lab.benchmarks.peers import worker
from lab.benchmarks.peers.vocabulary import ids_of, words_of
from lab.benchmarks.peers.worker import Answer

KINDS = {"ct2-fp32": "float32", "ct2-int8": "int8", "ct2-int8-packed": "int8"}


class CTranslate2:
    """CTranslate2's translator with a model; its input and output are words instead of ids.

    It encodes and decodes in one call, so the time of the encoder is the time of an answer of one token, minus a step.
    "ct2-int8-packed" packs the weights for the products. CTranslate2 packs for MKL only, so this variant also requests
    MKL on processors that are not Intel's.
    """

    def __init__(self, name: str, directory: Path, *, threads: int) -> None:
        """Converts the model if that has not been done yet, and loads it."""
        if name == "ct2-int8-packed":  # the library reads these variables once in a process
            os.environ |= {"CT2_USE_EXPERIMENTAL_PACKED_GEMM": "1", "CT2_USE_MKL": "1"}
        import ctranslate2

        kind = KINDS[name]
        target = worker.converted(
            directory.parent / f"ct2-{kind}",
            lambda part: ctranslate2.converters.TransformersConverter(str(directory)).convert(
                str(part), quantization=kind
            ),
        )
        options = {"compute_type": kind, "inter_threads": 1, "intra_threads": threads}
        self.translator = ctranslate2.Translator(str(target), device="cpu", **options)

    def run(self, source: list[list[int]], lengths: Sequence[int]) -> Answer:
        """See `worker.Model`; answers of different lengths are an error."""
        if len({*lengths}) > 1:
            raise ValueError(
                f"lengths: found {sorted({*lengths})}; expected one length, as CTranslate2 can force only one"
            )
        words = [words_of(ids) for ids in source]
        begun = time.perf_counter()
        self.generate(words, 1)
        middle = time.perf_counter()
        found = self.generate(words, lengths[0])
        end = time.perf_counter()
        one, whole = middle - begun, end - middle
        step = (whole - one) / max(lengths[0] - 1, 1)
        return Answer(one - step, whole - one + step, [ids_of(row) for row in found])

    def generate(self, words: list[list[str]], length: int) -> list[list[str]]:
        """Decodes greedy answers of exactly this length."""
        found = self.translator.translate_batch(
            words, beam_size=1, min_decoding_length=length, max_decoding_length=length, max_input_length=0
        )
        return [r.hypotheses[0] for r in found]


if __name__ == "__main__":
    worker.serve(lambda flags: CTranslate2(flags.name, flags.directory, threads=flags.threads), "ctranslate2")
