"""Sequential texts are split into rows at the separator, and not at similar texts."""

import pytest

from pipejax.methods import split_rows


@pytest.mark.parametrize(
    "text, separator, rows",
    [
        ("a b ; c", " ; ", ["a b", "c"]),
        ("R&amp;B ; f(x); ; Barbara Gaskin", " ; ", ["R&amp;B", "f(x);", "Barbara Gaskin"]),
        ("a  ;   b", " ; ", ["a", "b"]),  # tokenizers may change the number of spaces
        ("; a ;", " ; ", ["a"]),  # and the spaces at the ends
        ("a ; ; b", " ; ", ["a", "b"]),
        ("a;b ;c", ";", ["a", "b", "c"]),
        ("a\nb c", "\n", ["a", "b c"]),
        ("One sentence. Two.", " ", ["One sentence. Two."]),  # spaces alone separate nothing
        ("", " ; ", []),
        ("", " ", []),
        ("a # b (x|y) #1", " # ", ["a", "b (x|y) #1"]),
        ("a || b | c", " || ", ["a", "b | c"]),  # the separator is no regular expression
    ],
)
def test_text_is_split_at_the_separator(text, separator, rows):
    assert split_rows(text, separator) == rows
