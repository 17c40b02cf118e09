"""From the tokens of a text that is being written to what each of them adds."""

from pipejax.data.tokenizer import Tokenizer

WINDOW = 16  # tokens that are decoded again to see what one more adds, at the most


class Growing:
    """The text of a row of tokens while it grows: the pieces are the row's text when it is complete.

    Only the last tokens are decoded with each new one: all of them would take a time that grows with the row.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Without a tokenizer all pieces are empty."""
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the last ones
        self._said = ""  # of their text, what was given out

    def add(self, token: int) -> str:
        """The text that the token adds. Half a character waits for the other half."""
        if self._tokenizer is None or not 0 <= token < self._tokenizer.size:
            return ""
        self._ids.append(token)
        text = self._tokenizer.decode_known(self._ids)
        if text.endswith("\ufffd") or not text.startswith(self._said):
            return ""
        added, self._said = text[len(self._said) :], text
        if len(self._ids) >= WINDOW:
            later = self._tokenizer.decode_known(self._ids[WINDOW // 2 :])
            if later and text.endswith(later):
                self._ids, self._said = self._ids[WINDOW // 2 :], later
        return added

    def rest(self) -> str:
        """The text that still waits when the row ends."""
        text = self._tokenizer.decode_known(self._ids) if self._tokenizer and self._ids else ""
        added, self._said = text[len(self._said) :], text
        return added
