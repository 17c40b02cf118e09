"""Writes tickets.csv, archive.parquet and a tiny random T5 into the directory that is its argument.

A ticket names up to four products, and its tags are their topics, so a small model learns the task in a minute. The CSV
is as exports are: a BOM, semicolons, empty titles, cells without tags, `null`, emoji, and three lines with a column too
many. The archive has nulls where the CSV has empty cells, and no tags.
"""

import csv
import json
import random
import sys
from pathlib import Path

import numpy as np
import sentencepiece
from safetensors.numpy import save_file

ROWS, RAGGED = 1500, (40, 400, 1200)
TOPICS = {
    "router": "home network",
    "modem": "home network",
    "invoice": "billing",
    "refund": "billing",
    "password": "account access",
    "login": "account access",
    "printer": "office device",
    "scanner": "office device",
    "phone": "mobile plan",
    "roaming": "mobile plan",
}
FILLER = (
    "customer",
    "says",
    "it",
    "was",
    "fine",
    "last",
    "week",
    "asks",
    "us",
    "to",
    "look",
    "again",
    "soon",
    "please",
)
SIZES = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2}


def ticket(number: int, rng: random.Random) -> dict[str, str]:
    """A ticket with its tags, in the order in which its text names the products."""
    products = rng.sample(list(TOPICS), rng.randint(1, 4))
    words = [word for product in products for word in (product, *rng.sample(FILLER, 3))]
    tags = " | ".join(dict.fromkeys(TOPICS[product] for product in products))
    title = f"about the {products[0]}" if number % 9 else ""
    smile = " \N{SLIGHTLY SMILING FACE}" if number % 50 == 7 else ""
    return {"ticket": f"T-{number}", "title": title, "body": " ".join(words) + smile, "tags": tags}


def write_table(path: Path, tickets: list[dict[str, str]]) -> None:
    """Writes the CSV, with its irregularities."""
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        lines = csv.writer(file, delimiter=";")
        lines.writerow(tickets[0])
        for number, one in enumerate(tickets):
            tags = "" if number % 21 == 5 else one["tags"]
            more = ["surplus"] if number in RAGGED else []
            lines.writerow([one["ticket"], one["title"], one["body"], tags, *more])


def write_archive(path: Path, tickets: list[dict[str, str]]) -> None:
    """Writes the Parquet file of tickets without tags."""
    import pyarrow
    from pyarrow import parquet

    columns = {key: [one[key] or None for one in tickets] for key in ("ticket", "title", "body")}
    parquet.write_table(pyarrow.table(columns), path)


def write_model(directory: Path, texts: list[str]) -> None:
    """Writes a T5 v1.1 of random weights in Hugging Face's layout, whose vocabulary is trained on the texts."""
    directory.mkdir()
    corpus = directory.parent / "corpus.txt"
    corpus.write_text("\n".join(texts))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(directory / "spiece"),
        vocab_size=200,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (directory / "spiece.vocab").unlink()
    vocabulary = 320  # the pieces, and then T5's 100 sentinels
    facts = {"model_type": "t5", "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    facts |= {"vocab_size": vocabulary, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(facts | SIZES))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T5Tokenizer"}))
    width, inner, hidden = SIZES["d_model"], SIZES["num_heads"] * SIZES["d_kv"], SIZES["d_ff"]
    shapes: dict[str, tuple[int, ...]] = {"shared": (vocabulary, width), "lm_head": (vocabulary, width)}
    for stack, parts in (("encoder", ["Self", ""]), ("decoder", ["Self", "EncDec", ""])):
        for block in range(2):
            for layer, part in enumerate(parts):
                place = f"{stack}.block.{block}.layer.{layer}"
                shapes[f"{place}.layer_norm"] = (width,)
                if part:
                    shapes |= {f"{place}.{part}Attention.{name}": (inner, width) for name in "qkv"}
                    shapes[f"{place}.{part}Attention.o"] = (width, inner)
                else:
                    shapes |= {f"{place}.DenseReluDense.{name}": (hidden, width) for name in ("wi_0", "wi_1")}
                    shapes[f"{place}.DenseReluDense.wo"] = (width, hidden)
        shapes[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"] = (32, SIZES["num_heads"])
        shapes[f"{stack}.final_layer_norm"] = (width,)
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in shapes.items():
        scale = 1.0 if name in ("shared", "lm_head") else shape[-1] ** -0.5
        values = np.ones(shape) if "norm" in name else rng.normal(size=shape) * scale
        tensors[f"{name}.weight"] = values.astype(np.float32)
    tensors["lm_head.weight"] *= width**-0.5
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    folder, chance = Path(sys.argv[1]), random.Random(0)
    made = [ticket(number, chance) for number in range(ROWS)]
    write_table(folder / "tickets.csv", made)
    write_archive(folder / "archive.parquet", [ticket(number, chance) for number in range(ROWS, ROWS + 300)])
    write_model(folder / "tiny-t5", [f"{one['title']} {one['body']} {one['tags']} Title: Text: |" for one in made])
