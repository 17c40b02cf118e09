"""Functions that write tokenizers of many kinds to a directory, as transformers saves them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

Make = Callable[[Path], Path]
WORDS = ["▁the", "▁fox", "▁jumps", "▁over", "▁a", "▁dog", "▁", "es", "s", "e", "x"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
T5_IDS = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}


def save(directory: Path, inner: tokenizers.Tokenizer, kind: str = "", **specials: Any) -> Path:
    """Saves a tokenizer; `kind`: its tokenizer_class, "" for a class that uses tokenizer.json unchanged."""
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **specials).save_pretrained(directory)
    if kind:
        rename(directory, kind)
    return directory


def train_spiece(directory: Path, text: str, pieces: int, **settings: Any) -> Path:
    """Writes only a spiece.model of `pieces` pieces, trained on a text; `settings`: sentencepiece's, such as T5_IDS."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text[i:] + text[:i] for i in range(len(text))]),
        model_prefix=str(directory / "spiece"),
        vocab_size=pieces,
        minloglevel=2,
        **settings,
    )
    (directory / "spiece.vocab").unlink()
    return directory


def rename(directory: Path, kind: str, **settings: Any) -> Path:
    """Sets tokenizer_class and other settings of a saved tokenizer."""
    file = directory / "tokenizer_config.json"
    content = json.loads(file.read_text()) | {"tokenizer_class": kind} | settings
    file.write_text(json.dumps({key: x for key, x in content.items() if x is not None}))
    return directory


def numbered(*pieces: str) -> dict[str, int]:
    """Ids by piece, in the order of the pieces."""
    return {piece: i for i, piece in enumerate(pieces)}


def roberta(directory: Path, kind: str = "RobertaTokenizer") -> Path:
    """CodeT5's kind: bytes with merges, `<s> ... </s>` around a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = numbered("<pad>", "<s>", "</s>", "<unk>", *alphabet, "Ġt", "he", "Ġthe", "ox", "<mask>")
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("o", "x")]
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 1), add_prefix_space=False)
    names = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"}
    return save(directory, inner, kind, pad_token="<pad>", unk_token="<unk>", **names)


def bert(directory: Path, kind: str = "BertTokenizer") -> Path:
    """The kind of Chinese T5s: pieces of words, `[CLS] ... [SEP]` around a text, and no eos."""
    pieces = ["[PAD]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "fox", "##es", "##s", "中", "文", "."]
    inner = tokenizers.Tokenizer(models.WordPiece(numbered(*pieces, *LETTERS), unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    inner.post_processor = processors.BertProcessing(("[SEP]", 4), ("[CLS]", 3))
    names = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]"}
    return save(directory, inner, kind, mask_token="[MASK]", **names)


def gemma(directory: Path) -> Path:
    """Gemma's kind: pieces with byte fallback, a bos before a text, and nothing after it."""
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *BYTES, "▁", *LETTERS, "th", "the", "▁the", "fo", "fox"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("f", "o"), ("fo", "x")]
    inner = tokenizers.Tokenizer(
        models.BPE(numbered(*pieces), merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    inner.normalizer = normalizers.Replace(" ", "▁")
    inner.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return save(directory, inner, "GemmaTokenizer", mask_token="<mask>", **names)


def unigram(pieces: list[str], unknown: int, **settings: Any) -> tokenizers.Tokenizer:
    """SentencePiece's kind: later pieces are less likely, and each word has a space before it."""
    scores = [(piece, -float(i)) for i, piece in enumerate(pieces)]
    inner = tokenizers.Tokenizer(models.Unigram(scores, unknown, **settings))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    inner.decoder = decoders.Metaspace(prepend_scheme="always")
    return inner


def t5(directory: Path) -> Path:
    """T5's kind: an eos after a text."""
    inner = unigram(["<pad>", "</s>", "<unk>", *WORDS, *LETTERS], 2)
    inner.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return rename(save(directory, inner, **names), "T5Tokenizer", extra_ids=0)


def byt5(directory: Path) -> Path:
    """ByT5's kind: bytes without the library tokenizers, and an eos after a text that does not end with one."""
    transformers.ByT5Tokenizer().save_pretrained(directory)
    return directory


def gpt2(directory: Path) -> Path:
    """GPT-2's kind: bytes, and nothing around a text."""
    end, alphabet = "<|endoftext|>", sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE(numbered(end, *alphabet), []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return save(directory, inner, eos_token=end)


def words(directory: Path) -> Path:
    """A kind of whole words, with a template of three ids around a text, two of them after it."""
    inner = tokenizers.Tokenizer(models.WordLevel(numbered("<pad>", "</s>", "<unk>", "<2en>", *LETTERS), "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    around: Mapping[str, Any] = {"special_tokens": [("<2en>", 3), ("</s>", 1)]}
    inner.post_processor = processors.TemplateProcessing(single="<2en> $A </s> <2en>", **around)
    inner.add_special_tokens(["<2en>"])
    return save(directory, inner, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


KINDS: dict[str, Make] = {
    "roberta": roberta,
    "roberta as it is": lambda directory: roberta(directory, ""),
    "bert": bert,
    "bert as it is": lambda directory: bert(directory, ""),
    "gemma": gemma,
    "t5": t5,
    "byt5": byt5,
    "gpt2": gpt2,
    "words": words,
}
