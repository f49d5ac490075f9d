"""Text from tokens, piece by piece."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from .errors import TextError, described

logger = logging.getLogger(__name__)

_INCOMPLETE = "\ufffd"
"""What a tokenizer decodes the first bytes of an unfinished character to."""


class Detokenizer:
    """Turns one request's tokens into text as they come; the pieces join to the whole text.

    A token's text depends on its left neighbour (spaces) and, where a character's bytes are spread
    over tokens, on its right ones. So each piece is the difference of two decodings that start at
    the same earlier token, and it waits until its last character is whole.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
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
        tokens = self._tokens[start:end]
        return decode(self._tokenizer, tokens, skip_special_tokens=self._skip_special_tokens)


class StopText:
    """One request's text up to the first of its stop strings, wherever the tokens cut that.

    `take` reads each token once; `push` and `flush` are a Detokenizer's, but hold back the end of
    the text as long as it may be the beginning of a stop string. Special tokens are part of what
    is searched, not of the text.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self.text = ""
        self.stopped = False
        self._stops = tuple(stops)
        self._pieces = Detokenizer(tokenizer, skip_special_tokens=False)
        self._special = frozenset(tokenizer.all_special_ids)
        self._held = ""
        self._is_text: list[bool] = []  # of each character held: no special token's
        self._ready = ""

    def take(self, token: int) -> bool:
        """Reads one token; whether a stop string is complete with it."""
        self._hold(self._pieces.push(token), is_text=token not in self._special)
        found = [at for at in map(self._held.find, self._stops) if at >= 0]
        self.stopped = bool(found)
        self._release(min(found) if found else len(self._held) - self._num_doubtful())
        return self.stopped

    def push(self, token: int) -> str:
        """The text that is certain since the last call; `token` was taken already."""
        ready, self._ready = self._ready, ""
        return ready

    def flush(self) -> str:
        """What is left at the end; nothing after a stop string."""
        self.close()
        return self.push(-1)

    def close(self) -> None:
        """Notes that no token follows: `text` is whole then. Closing twice is nothing."""
        if not self.stopped:
            self._hold(self._pieces.flush(), is_text=True)
            self._release(len(self._held))

    def _hold(self, piece: str, *, is_text: bool) -> None:
        self._held += piece
        self._is_text += [is_text] * len(piece)

    def _num_doubtful(self) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        longest = min(len(self._held), max(map(len, self._stops)) - 1)
        sizes = range(longest, 0, -1)
        return next((n for n in sizes if self._may_begin(self._held[-n:])), 0)

    def _may_begin(self, ending: str) -> bool:
        return any(stop.startswith(ending) for stop in self._stops)

    def _release(self, end: int) -> None:
        piece = "".join(c for c, is_text in zip(self._held[:end], self._is_text) if is_text)
        self._held, self._is_text = self._held[end:], self._is_text[end:]
        self._ready += piece
        self.text += piece


def decode(tokenizer: Any, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
    """The text of tokens, without special ones and with spaces as they are. TextError if the tokenizer fails at it."""
    try:
        text: str = tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
    except Exception as error:
        # Any code may stand behind a tokenizer. Whatever it raises ends the request whose tokens these are, alone.
        logger.exception("the tokenizer raised")
        raise TextError(f"the tokenizer raised {described(error)}") from error
    return text
