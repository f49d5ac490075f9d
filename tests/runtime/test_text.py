"""Streamed text: pieces join to the whole, and no piece ends within a character."""

from __future__ import annotations

import random

import pytest

from regraft.runtime.text import Detokenizer, decode
from tests.runtime.tokenizers_made_here import byte_tokenizer, word_tokenizer

TEXTS = [
    "plain words, and  two spaces ",
    "naïve café – “quoted” … 日本語のテキスト",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, é as e + ́",
    "\n\n\ttabs\r\n",
    "\ufffd a real replacement character \ufffd",
]


def pieces_of(tokenizer, tokens):
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_become_whole_characters(text):
    tokenizer = byte_tokenizer()
    tokens = tokenizer(text)["input_ids"]
    assert len(tokens) == len(text.encode())
    pieces = pieces_of(tokenizer, tokens)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert pieces[:-1] == character_at_its_last_byte(text)
        assert pieces[-1] == ""


def character_at_its_last_byte(text):
    return [part for char in text for part in [*[""] * (len(char.encode()) - 1), char]]


def test_words_keep_their_spaces():
    tokenizer = word_tokenizer(["so", "it", "goes"])
    tokens = tokenizer("so it goes so")["input_ids"]
    assert pieces_of(tokenizer, tokens) == ["so", " it", " goes", " so", ""]


def test_an_unfinished_character_comes_at_the_end():
    tokenizer = byte_tokenizer()
    tokens = tokenizer("aé")["input_ids"][:2]
    assert pieces_of(tokenizer, tokens) == ["a", "", "\ufffd"]


def test_special_tokens_have_no_text():
    tokenizer = byte_tokenizer()
    tokens = [*tokenizer("hi")["input_ids"], 256, *tokenizer("é")["input_ids"], 256]
    assert pieces_of(tokenizer, tokens) == ["h", "i", "", "", "é", "", ""]


@pytest.mark.parametrize("seed", range(50))
def test_any_bytes_join_to_the_whole(seed):
    """Also those that are no text at all."""
    rng = random.Random(seed)
    tokenizer = byte_tokenizer()
    common = tokenizer("é日👍 a")["input_ids"]
    tokens = [rng.choice([rng.randrange(257), rng.choice(common)]) for _ in range(60)]
    assert "".join(pieces_of(tokenizer, tokens)) == decode(tokenizer, tokens)
