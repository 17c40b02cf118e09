"""The bytes of text that each token of a vocabulary writes, independent of the tokens before it."""

from pipejax.data.tokenizer import BYTE, Tokenizer
from pipejax.system.errors import UserError

SPACE = "▁"  # represents a space in the pieces of SentencePiece


def token_bytes(tokenizer: Tokenizer, size: int) -> list[bytes]:
    """Returns the bytes of the ids below `size`; special and unknown tokens have none."""
    pieces = [tokenizer.piece(i) if tokenizer.is_word(i) else "" for i in range(size)]
    kinds = tokenizer.decoders()
    if kinds is None and all(piece <= "\xff" for piece in pieces):  # ByT5's
        return [piece.encode("latin-1") for piece in pieces]
    if kinds == ():  # a vocabulary of words, which the tokenizer joins with spaces
        return [f" {piece}".encode() if piece else b"" for piece in pieces]
    if kinds == ("ByteLevel",):
        codes = _byte_level()
        return [bytes(codes[char] for char in piece) if {*piece} <= codes.keys() else b"" for piece in pieces]
    if kinds is None or not {*kinds} <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
        raise UserError(
            "tokenizer",
            found=f"the decoding steps {', '.join(kinds)}" if kinds else "unknown decoding steps",
            expected="a tokenizer of SentencePiece pieces or of bytes",
        )
    found = [piece.replace(SPACE, " ").encode() for piece in pieces]
    if "ByteFallback" in kinds:
        bytes_apart = ((i, BYTE.fullmatch(tokenizer.piece(i))) for i in range(size))
        for i, byte in bytes_apart:
            found[i] = bytes([int(byte[1], 16)]) if byte else found[i]
    return found


def _byte_level() -> dict[str, int]:
    """Returns the byte of each character in GPT-2's vocabularies.

    Visible characters represent themselves; other bytes are represented by other characters.
    """
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
