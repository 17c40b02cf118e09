r"""Makes the files to pretrain a small T5 without published weights: initial weights, a tokenizer, and examples.

    python -m lab.experiments.pretraining --output DIR texts.jsonl.gz ...     # lines with a "source"; no test splits
    python train.py --config configs/copying.py --workdir DIR/words --set train.init_from=DIR/start \
        --set data.train=DIR/words.jsonl --set train.steps=500
    python train.py --config configs/copying.py --workdir DIR/run --set train.init_from=DIR/words \
        --set data.train=DIR/train.jsonl --set data.dev=DIR/dev.jsonl

A few thousand labelled documents do not teach random weights to copy, but the texts of these documents do. The model
first trains on random words, whose target is the source: only copying helps there. Then it trains on two examples of
every stretch of a document, with the templates of the published tasks: the target for "Title: ... Context: ..." has the
phrases that are frequent in the document and rare elsewhere, in order of appearance; the target for "summarize: ..."
has the first sentences. Each target is one row, as in the pretraining of T5: the sequential method continues in the
form of the pretraining, and rows are new.
"""

import dataclasses
import gzip
import json
import math
import random
import re
import string
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pipejax import config as config_lib
from pipejax.apps.papers import texts
from pipejax.checkpoint import require_free, save_params
from pipejax.config import T5Config
from pipejax.data import text
from pipejax.data.lines import read_objects, text_of
from pipejax.data.tokenizer import Tokenizer, import_transformers
from pipejax.system import cli
from pipejax.system.errors import UserError
from pipejax.system.files import write_text
from pipejax.system.progress import Progress

ROOT = Path(__file__).parents[2]
STRETCH = 64  # most words of a source, without the template
PHRASES, SENTENCES = 5, 2  # most phrases and sentences of a target
COMMON = 200  # the words in the most documents, with which no phrase begins or ends
DEV = 200  # one document in 200 is kept for the loss on unseen text
PREFERENCE = 4.0  # added to a head's bias for one neighbour, which makes it e^4 = 55 times as likely as others


def main(argv: Sequence[str]) -> int:
    """Reads texts; writes DIR/start and the files words.jsonl, train.jsonl and dev.jsonl in DIR."""
    parser = cli.Parser(prog="python -m lab.experiments.pretraining", description=__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE", help='JSON lines, or JSON lines in gzip, with a "source"')
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for weights and examples")
    parser.add_argument(
        "--config", default=str(ROOT / "configs/copying.py"), help="config with the model (default: copying)"
    )
    flags = parser.parse_args(argv)
    output, config = Path(flags.output), config_lib.load(flags.config)
    if not isinstance(config.model, T5Config):
        raise UserError(flags.config, found="no model", expected="`model=T5Config(...)`")
    require_free(output / "start")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {output}", f"cannot be written ({error.strerror})") from error
    documents = [texts.plain_text(document) for path in flags.files for document in read(path)]
    if not documents:
        raise UserError(flags.files[0], found="no lines", expected="texts")
    if not any(character.isalpha() for document in documents for character in document):
        raise UserError(flags.files[0], found="no words", expected="texts")
    parts: dict[str, list[str]] = {"words": [], "train": [], "dev": []}
    counts = document_frequencies(documents)
    for number, drawn in enumerate(random_words(counts)):
        parts["words"].append(json.dumps({"id": str(number), "source": drawn, "targets": [drawn]}))
    progress = Progress("making examples", len(documents), unit="document")
    for number, found in enumerate(examples(documents, counts)):
        split = "dev" if number % DEV == DEV // 2 or number == len(documents) - 1 else "train"
        for name, source, target in found:
            value = {"id": f"{number}/{name}", "source": source, "targets": [target]}
            parts[split].append(json.dumps(value, ensure_ascii=False))
        progress.add(1)
    progress.close()
    try:
        for split, lines in parts.items():
            write_text(output / f"{split}.jsonl", "\n".join(lines) + "\n")
    except OSError as error:
        raise UserError(f"--output {output}", f"cannot be written ({error.strerror})") from error
    with tempfile.TemporaryDirectory() as scratch:  # the weights are written last: they mark the output as complete
        learn_tokenizer(documents, config.model.vocab_size).save(Path(scratch) / "tokenizer")
        untrained = dataclasses.replace(config, train=dataclasses.replace(config.train, method="none"))
        save_params(output / "start", untrained, weights(config.model), tokenizer_source=Path(scratch) / "tokenizer")
    cli.note(f"{len(documents)} documents: {len(parts['train'])} examples, {len(parts['dev'])} for the dev split")
    return 0


def read(path: str) -> Iterator[str]:
    """Yields the sources in a file."""
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
            for place, value in read_objects(file, path):
                yield text_of(value, "source", place)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(path, f"cannot be read ({getattr(error, 'strerror', None) or error})") from error


def weights(model: T5Config) -> Any:
    """Draws random weights, with some heads that attend to neighbours from the start.

    Only cross-attention can copy, and it has no positions: it finds the next token to copy only if the encoder has put
    the previous token into the vector of that token. A head needs a bias for this, and Adam moves a bias by at most the
    learning rate in an update: from zero this takes thousands of updates. In the encoder the first head attends to the
    left neighbour, the second to the right neighbour, and the third to the token itself; in the decoder the first
    attends to the token itself, and the second to the previous token.
    """
    params = jax.device_get(model.init_params(jax.random.key(0)))
    after = model.relative_attention_num_buckets // 2  # the encoder's first bucket for keys after the query
    for stack, seen in (("encoder", (1, after + 1, 0)), ("decoder", (0, 1))):
        bias = np.array(params[stack]["relative_bias"]["embedding"])  # [buckets, heads]
        for head, bucket in zip(range(bias.shape[1]), seen, strict=False):
            bias[bucket, head] += PREFERENCE
        params[stack]["relative_bias"]["embedding"] = bias
    return params


def learn_tokenizer(documents: Iterable[str], size: int) -> Tokenizer:
    """Learns pieces of lower-cased text by the unigram model (Kudo 2018), with T5's special tokens at T5's ids."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()])
    backend.decoder = decoders.Metaspace()
    special, alphabet = ["<pad>", "</s>", "<unk>"], list(string.ascii_lowercase + string.digits + string.punctuation)
    trainer = trainers.UnigramTrainer(
        vocab_size=size, special_tokens=special, unk_token="<unk>", initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(documents, trainer)
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])  # as in T5
    names = dict(zip(("pad_token", "eos_token", "unk_token"), special, strict=True))
    return Tokenizer(import_transformers().PreTrainedTokenizerFast(tokenizer_object=backend, **names))


def document_frequencies(documents: Iterable[str]) -> Counter[str]:
    """The number of documents with each word. Words are in order of appearance, so that ties are equal in all runs."""
    counts: Counter[str] = Counter()
    for document in documents:
        counts.update(dict.fromkeys(words_of(document), 1))
    return counts


def examples(documents: Sequence[str], counts: Counter[str]) -> Iterator[list[tuple[str, str, str]]]:
    """Yields the examples ("STRETCH/KIND", source, target) of each document, from the document frequencies of words."""
    common = {word for word, _ in counts.most_common(COMMON)}
    rarity = {word: math.log(len(documents) / count) for word, count in counts.items()}
    for document in documents:
        phrases = phrases_of(words_of(document), common, rarity)
        found = []
        for place, sentences in enumerate(stretches(document)):
            source = " ".join(sentences)
            if chosen := best(source, phrases):
                titled = f"Title: {sentences[0]} Context: {' '.join(sentences[1:])}"
                found.append((f"{place}/phrases", titled, "; ".join(chosen)))
            found.append((f"{place}/sentences", f"summarize: {source}", " ".join(sentences[:SENTENCES])))
        yield found


def random_words(counts: Counter[str], *, count: int = 10_000, known: int = 20_000) -> Iterator[str]:
    """Yields `count` texts of 6 to 14 words, drawn uniformly from the `known` words that are in the most documents."""
    words = [word for word, _ in counts.most_common() if word.isalpha()][:known]
    chance = random.Random(0)
    for _ in range(count):
        yield " ".join(chance.choices(words, k=chance.randint(6, 14)))


def words_of(document: str) -> list[str]:
    """Splits a document into lower-cased words and single punctuation marks."""
    return re.findall(r"\w+(?:[-']\w+)*|[^\w\s]", document.lower())


def phrases_of(words: Sequence[str], common: set[str], rarity: dict[str, float]) -> dict[tuple[str, ...], float]:
    """The weights of phrases of one to three words that occur in the document more than once.

    The weight is the count of the phrase times the sum of the rarities of its words. The rarity of a word is the
    logarithm of the number of documents divided by the number of documents with the word.
    """
    counts: Counter[tuple[str, ...]] = Counter()
    for length in (1, 2, 3):
        for phrase in zip(*(words[i:] for i in range(length)), strict=False):
            ends = phrase[0] in common or phrase[-1] in common
            if not ends and all(word[0].isalpha() for word in phrase):
                counts[phrase] += 1
    return {p: count * sum(rarity[word] for word in p) for p, count in counts.items() if count > 1}


def best(source: str, phrases: dict[tuple[str, ...], float]) -> list[str]:
    """The phrases in the source with the largest weights, in order of appearance; no two share a word."""
    words = words_of(source)
    first: dict[tuple[str, ...], int] = {}
    for length in (3, 2, 1):
        for place, phrase in enumerate(zip(*(words[i:] for i in range(length)), strict=False)):
            if phrase in phrases:
                first.setdefault(phrase, place)
    chosen: list[tuple[str, ...]] = []
    for phrase in sorted(first, key=lambda p: -phrases[p]):
        if len(chosen) < PHRASES and not any(set(phrase) & set(other) for other in chosen):
            chosen.append(phrase)
    return [" ".join(phrase) for phrase in sorted(chosen, key=first.__getitem__)]


def stretches(document: str) -> Iterator[list[str]]:
    """Yields runs of two or more successive sentences with at most STRETCH words and at least half as many."""
    run: list[str] = []
    size = 0
    for sentence in text.sentences(document):
        length = len(sentence.split())
        if length > STRETCH // 2 or size + length > STRETCH:
            if len(run) > 1:
                yield run
            run, size = [], 0
        if length <= STRETCH // 2:
            run.append(sentence)
            size += length
    if len(run) > 1:
        yield run


if __name__ == "__main__":
    cli.run(main)
