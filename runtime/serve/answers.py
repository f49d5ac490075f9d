"""Choices, usage and errors as OpenAI's API writes them."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from regraft.runtime.output import RequestOutput, StreamToken
from regraft.runtime.text import decode

Pairs = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Piece:
    """Some tokens of one choice in a row, with their text, and why it ended if it did.

    `logprobs` are None where they are not asked for; `top` are the likeliest tokens at each place.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float | None] | None
    top: list[list[tuple[int, float]]]
    finish_reason: str | None

    @classmethod
    def of_tokens(cls, tokens: Sequence[StreamToken], *, wants_logprobs: bool) -> Piece:
        """Of tokens that a stream gave."""
        made = [token for token in tokens if token.token_id is not None]
        return cls(
            text="".join(token.text for token in tokens),
            token_ids=[token.token_id for token in made if token.token_id is not None],
            logprobs=[token.logprob for token in made] if wants_logprobs else None,
            top=[token.top_logprobs or [] for token in made],
            finish_reason=tokens[-1].finish_reason if tokens else None,
        )

    @classmethod
    def of_output(cls, output: RequestOutput, *, wants_logprobs: bool) -> Piece:
        """Of a whole result."""
        return cls(
            text=output.text or "",
            token_ids=output.token_ids,
            logprobs=list(output.logprobs or []) if wants_logprobs else None,
            top=output.top_logprobs or [[] for _ in output.token_ids],
            finish_reason=output.finish_reason,
        )

    @classmethod
    def of_prompt(cls, output: RequestOutput, text: str, *, wants_logprobs: bool) -> Piece:
        """Of the prompt, echoed."""
        return cls(
            text=text,
            token_ids=output.prompt_token_ids,
            logprobs=[_floor(v) for v in output.prompt_logprobs or []] if wants_logprobs else None,
            top=output.prompt_top_logprobs or [[] for _ in output.prompt_token_ids],
            finish_reason=None,
        )

    def after(self, earlier: Piece) -> Piece:
        """Both in one."""
        both = self.logprobs is not None and earlier.logprobs is not None
        return Piece(
            earlier.text + self.text,
            earlier.token_ids + self.token_ids,
            [*(earlier.logprobs or []), *(self.logprobs or [])] if both else None,
            earlier.top + self.top,
            self.finish_reason,
        )


class Style:
    """Writes one kind of completion: `text_completion`, or `chat.completion`."""

    kind = "text_completion"
    chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, model: str, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, pieces: Sequence[Piece], usage: dict[str, int]) -> dict[str, Any]:
        """The answer to a call that does not stream."""
        choices = [self.choice(index, piece) for index, piece in enumerate(pieces)]
        return {**self._head, "object": self.kind, "choices": choices, "usage": usage}

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> str:
        """One event of a stream."""
        body = {**self._head, "object": self.chunk_kind, "choices": choices}
        return event({**body, "usage": usage} if usage is not None else body)

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a choice begins with in a stream, before its text."""
        return None

    def choice(self, index: int, piece: Piece) -> dict[str, Any]:
        """A whole choice."""
        return {
            "index": index,
            "text": piece.text,
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
        }

    def delta(self, index: int, piece: Piece) -> dict[str, Any]:
        """A choice's next part."""
        return self.choice(index, piece)

    def token(self, token_id: int) -> str:
        """The text of one token, special ones too."""
        return decode(self._tokenizer, [token_id], skip_special_tokens=False)

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if piece.logprobs is None:
            return None
        tokens = [self.token(token_id) for token_id in piece.token_ids]
        ends = [len(token) for token in tokens]
        return {
            "tokens": tokens,
            "token_logprobs": piece.logprobs,
            # Tokens may have one text (parts of a character): the likelier stands.
            "top_logprobs": [{self.token(i): p for i, p in reversed(top)} for top in piece.top],
            "text_offset": [sum(ends[:i]) for i in range(len(ends))],
        }


class ChatStyle(Style):
    """The same of a chat."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def opening(self, index: int) -> dict[str, Any]:
        """The role of who speaks."""
        return self._delta(index, {"role": "assistant", "content": ""}, None, None)

    def choice(self, index: int, piece: Piece) -> dict[str, Any]:
        """A whole message."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": piece.text},
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
        }

    def delta(self, index: int, piece: Piece) -> dict[str, Any]:
        """A message's next part."""
        content = {"content": piece.text} if piece.text or piece.token_ids else {}
        return self._delta(index, content, self._logprobs(piece), piece.finish_reason)

    def _delta(self, index: int, delta: dict[str, Any], logprobs: Any, reason: str | None) -> Any:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if piece.logprobs is None:
            return None
        content = [
            {**self._entry(token, value), "top_logprobs": [self._entry(*pair) for pair in top]}
            for token, value, top in zip(piece.token_ids, piece.logprobs, piece.top)
        ]
        return {"content": content}

    def _entry(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        text = self.token(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _floor(logprob: float | None) -> float | None:
    """JSON has no infinity: OpenAI's word for an impossible token is -9999."""
    return None if logprob is None else max(logprob, -9999.0)


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Tokens of one call."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def event(body: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(body, separators=(',', ':'), allow_nan=False)}\n\n"


def error(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    """The body of an answer that is an error."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
