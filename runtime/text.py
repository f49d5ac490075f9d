"""Text from tokens, piece by piece."""

from __future__ import annotations

from typing import Any

_INCOMPLETE = "\ufffd"
"""What a tokenizer decodes the first bytes of an unfinished character to."""


class Detokenizer:
    """Turns one request's tokens into text as they come; the pieces join to the whole text.

    A token's text depends on its left neighbour (spaces) and, where a character's bytes are spread
    over tokens, on its right ones. So each piece is the difference of two decodings that start at
    the same earlier token, and it waits until its last character is whole.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._start = 0  # both decodings start here
        self._done = 0  # the text of the tokens before this one has been given out

    def push(self, token: int) -> str:
        """The text that `token` completes, "" if it ends within a character."""
        self._tokens.append(token)
        given, text = self._decode(self._start, self._done), self._decode(self._start)
        if len(text) <= len(given) or text.endswith(_INCOMPLETE):
            return ""
        self._start, self._done = self._done, len(self._tokens)
        return text[len(given) :]

    def flush(self) -> str:
        """What is left at the end: an unfinished character, if anything."""
        given, text = self._decode(self._start, self._done), self._decode(self._start)
        self._start = self._done = len(self._tokens)
        return text[len(given) :]

    def _decode(self, start: int, end: int | None = None) -> str:
        return decode(self._tokenizer, self._tokens[start:end])


def decode(tokenizer: Any, token_ids: list[int]) -> str:
    """The text of tokens, without special ones and with spaces as they are."""
    text: str = tokenizer.decode(
        token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text
