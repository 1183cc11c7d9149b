"""Texts from tokens: pieces add up, characters stay whole, and stop strings end a text."""

import itertools

import numpy as np
import pytest

from meshdsl.generation.texts import Text, prompt_tokens, write_texts
from meshdsl.training.data.tokenizers import Bytes, load_tokenizer


def pieces_of(text, stop=(), tokenizer=None, close=True):
    """Returns the pieces in which a text is settled, and the text."""
    tokenizer = tokenizer or Bytes()
    made = Text("", tokenizer, stop)
    pieces = []
    for token in text:
        if made.finish is None:
            pieces.append(made.add(token))
    if close and made.finish is None:
        pieces.append(made.close("length"))
    return pieces, made


def test_pieces_add_up_to_the_text_and_have_whole_characters():
    wanted = "naïve — 日本語 🙂 end"
    pieces, text = pieces_of(wanted.encode())
    assert "".join(pieces) == text.written == wanted
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    assert text.finish == "length"


def test_what_is_no_utf_8_is_shown_as_such():
    pieces, _ = pieces_of(b"a\xffb\xe2\x82")
    assert "".join(pieces) == b"a\xffb\xe2\x82".decode(errors="replace")


def test_the_end_token_ends_a_text():
    pieces, text = pieces_of(b"abc\0def")
    assert ("".join(pieces), text.finish, text.tokens) == ("abc", "end", [97, 98, 99])


@pytest.mark.parametrize(
    ("text", "stop", "wanted"),
    [
        ("one\n\ntwo", ["\n\n"], "one"),
        ("one\ntwo", ["\n\n"], "one\ntwo"),
        ("abcabd", ["abd"], "abc"),
        ("aaab", ["aab"], "a"),
        ("x END y", ["y", " END"], "x"),
        ("almost EN", ["END"], "almost EN"),
    ],
)
def test_a_stop_string_ends_a_text_before_it(text, stop, wanted):
    pieces, made = pieces_of(text.encode(), stop)
    assert "".join(pieces) == made.written == wanted
    assert made.finish == ("length" if wanted == text else "stop")
    for end in range(len(pieces)):  # nothing was shown that was then taken back
        assert wanted.startswith("".join(pieces[:end]))


def test_any_way_of_cutting_gives_the_same():
    for letters in itertools.product("ab", repeat=6):
        text = "".join(letters)
        wanted = text.split("aba")[0]
        assert pieces_of(text.encode(), ["aba"])[1].written == wanted


def test_a_tokenizer_that_joins_words(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "a": 1, "b": 2}, "</s>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert prompt_tokens(tokenizer, ["a b", ""]) == [[1, 2], [0]]
    assert prompt_tokens(tokenizer, ["a b", "", "b"], begin=2) == [[2, 1, 2], [2], [2]]
    assert prompt_tokens(tokenizer, ["a", ""], start=1, begin=2) == [[2, 1, 0], [2, 0]]
    pieces, text = pieces_of([1, 2, 1, 0, 2], tokenizer=tokenizer)
    assert (pieces, text.written, text.finish) == (["a", " b", " a", ""], "a b a", "end")


class Canned:
    """Writes given bytes after any prompt."""

    start = None

    def __init__(self, texts, batch):
        self._texts, self.seen = texts, []
        self.sizes = type("Sizes", (), {"batch": batch})

    def write(self, prompts, numbers):
        self.seen.append((prompts, list(numbers)))
        rows = [self._texts[number] for number in numbers]
        yield from (np.array([row[at] for row in rows]) for at in range(len(rows[0])))


def test_texts_come_in_order_and_each_piece_is_shown():
    writer = Canned([b"ab\0x", b"cd!!", b"efgh"], batch=2)
    shown = ["", "", ""]

    def show(number, piece):
        shown[number] += piece

    texts = list(write_texts(writer, Bytes(), ["p", "", "q"], ["!"], show))
    assert [(text.prompt, text.written, text.finish) for text in texts] == [
        ("p", "ab", "end"),
        ("", "cd", "stop"),
        ("q", "efgh", "length"),
    ]
    assert shown == ["ab", "cd", "efgh"]
    assert writer.seen == [([[112], [0]], [0, 1]), ([[113]], [2])]
