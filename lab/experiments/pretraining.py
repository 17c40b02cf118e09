r"""A T5 where none can be had: random weights that soon learn to copy, a tokenizer, examples without labels.

    python -m lab.experiments.pretraining --output DIR texts.jsonl.gz ...     # lines with a "source"; no test splits
    python train.py --config configs/copying.py --workdir DIR/words --set train.init_from=DIR/start \
        --set data.train=DIR/words.jsonl --set train.steps=500
    python train.py --config configs/copying.py --workdir DIR/run --set train.init_from=DIR/words \
        --set data.train=DIR/train.jsonl --set data.dev=DIR/dev.jsonl

A few thousand labelled documents do not teach random weights to copy. Their texts do. First random words, to be written
again: nothing but copying helps there. Then two examples of every stretch of a document, with the templates of the
published tasks: "Title: ... Context: ..." asks for the phrases that are frequent in the document and rare elsewhere,
in order of appearance; "summarize: ..." asks for the first sentences. Each target is one row, as an ordinary T5 writes
it and as the paper's were pretrained: the sequential method goes on in the form it knows, rows are new.
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
STRETCH = 64  # words of a source, at the most, but for the template's
PHRASES, SENTENCES = 5, 2  # of a target, at the most
COMMON = 200  # words, by the documents they stand in, that begin and end no phrase
DEV = 200  # one document in so many is kept for the loss on unseen text
PREFERENCE = 4.0  # of a head for one neighbour, added to its bias: e^4 = 55 times as likely as any other


def main(argv: Sequence[str]) -> int:
    """Reads texts; writes DIR/start and DIR/words.jsonl, train.jsonl, dev.jsonl."""
    parser = cli.Parser(prog="python -m lab.experiments.pretraining", description=__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE", help='JSON lines, or JSON lines in gzip, with a "source"')
    parser.add_argument("--output", required=True, metavar="DIR", help="where weights and examples go")
    parser.add_argument("--config", default=str(ROOT / "configs/copying.py"), help="with the model (default: copying)")
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
    with tempfile.TemporaryDirectory() as scratch:  # last: once they are there, the command is done
        learn_tokenizer(documents, config.model.vocab_size).save(Path(scratch) / "tokenizer")
        untrained = dataclasses.replace(config, train=dataclasses.replace(config.train, method="none"))
        save_params(output / "start", untrained, weights(config.model), tokenizer_source=Path(scratch) / "tokenizer")
    cli.note(f"{len(documents)} documents: {len(parts['train'])} examples, {len(parts['dev'])} for the dev split")
    return 0


def read(path: str) -> Iterator[str]:
    """The sources of a file."""
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
            for place, value in read_objects(file, path):
                yield text_of(value, "source", place)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(path, f"cannot be read ({getattr(error, 'strerror', None) or error})") from error


def weights(model: T5Config) -> Any:
    """Random weights, but for some heads that look at neighbours from the start.

    Only cross-attention can copy, and it knows no positions: it can find the place to go on from if the encoder's token
    there has looked at the one before. That takes a bias of its own, and Adam moves a bias by no more than the learning
    rate an update: thousands of updates from zero. In the encoder the first head looks to the left, the second to
    the right, the third at the token itself; in the decoder the first looks at the token itself, the second at the one
    before.
    """
    params = jax.device_get(model.init_params(jax.random.key(0)))
    after = model.relative_attention_num_buckets // 2  # the encoder's buckets of keys that come after the query
    for stack, seen in (("encoder", (1, after + 1, 0)), ("decoder", (0, 1))):
        bias = np.array(params[stack]["relative_bias"]["embedding"])  # [buckets, heads]
        for head, bucket in zip(range(bias.shape[1]), seen, strict=False):
            bias[bucket, head] += PREFERENCE
        params[stack]["relative_bias"]["embedding"] = bias
    return params


def learn_tokenizer(documents: Iterable[str], size: int) -> Tokenizer:
    """Pieces of lower-cased text by the unigram model (Kudo 2018), with T5's special tokens at T5's ids."""
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
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])  # as T5's
    names = dict(zip(("pad_token", "eos_token", "unk_token"), special, strict=True))
    return Tokenizer(import_transformers().PreTrainedTokenizerFast(tokenizer_object=backend, **names))


def document_frequencies(documents: Iterable[str]) -> Counter[str]:
    """In how many documents each word stands; words in order of appearance, so that ties are the same in each run."""
    counts: Counter[str] = Counter()
    for document in documents:
        counts.update(dict.fromkeys(words_of(document), 1))
    return counts


def examples(documents: Sequence[str], counts: Counter[str]) -> Iterator[list[tuple[str, str, str]]]:
    """Yields each document's examples, given its words' document frequencies: ("STRETCH/KIND", source, target)."""
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
    """Yields `count` texts of 6 to 14 words, each drawn alike from the `known` words that stand in most documents."""
    words = [word for word, _ in counts.most_common() if word.isalpha()][:known]
    chance = random.Random(0)
    for _ in range(count):
        yield " ".join(chance.choices(words, k=chance.randint(6, 14)))


def words_of(document: str) -> list[str]:
    """Lower-cased words, and each mark of punctuation by itself."""
    return re.findall(r"\w+(?:[-']\w+)*|[^\w\s]", document.lower())


def phrases_of(words: Sequence[str], common: set[str], rarity: dict[str, float]) -> dict[tuple[str, ...], float]:
    """Phrases of one to three words that stand in the document more than once, and how much they say of it.

    That is their count times the sum of their words' rarity, the logarithm of the documents for one that has the word.
    """
    counts: Counter[tuple[str, ...]] = Counter()
    for length in (1, 2, 3):
        for phrase in zip(*(words[i:] for i in range(length)), strict=False):
            ends = phrase[0] in common or phrase[-1] in common
            if not ends and all(word[0].isalpha() for word in phrase):
                counts[phrase] += 1
    return {p: count * sum(rarity[word] for word in p) for p, count in counts.items() if count > 1}


def best(source: str, phrases: dict[tuple[str, ...], float]) -> list[str]:
    """The phrases in the source that say most, as they first appear; no two share a word."""
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
    """Runs of two or more successive sentences, of at most STRETCH words; none of more than half as many."""
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
