"""Answers calls with one engine."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from regraft.runtime.asynchronous import AsyncEngine, AsyncTokenStream
from regraft.runtime.engine import Engine
from regraft.runtime.errors import EngineFailedError, RequestError, TextError
from regraft.runtime.output import RequestOutput
from regraft.runtime.prompts import to_token_ids
from regraft.runtime.text import decode

from . import asking
from .answers import ChatStyle, Piece, Style, event, usage
from .metrics import Metrics
from .problems import body_of, check_end
from .protocol import ChatBody, CompletionBody, Sampling
from .settings import ServeSettings
from .streaming import EventStream, merged, while_connected


class Service:
    """Completions and chats, and what is told about the server."""

    def __init__(self, engine: Engine, settings: ServeSettings) -> None:
        self.settings = settings
        self.engine = engine
        self.served = AsyncEngine(
            engine, max_waiting=settings.max_waiting, stall_seconds=settings.stall_seconds
        )
        self.metrics = Metrics(self.served)
        self.started = int(time.time())

    def model(self, name: str) -> dict[str, Any]:
        """The one model, if that is its name."""
        self._check_name(name)
        limit = self.engine.model.max_positions or self.engine.max_cached
        model = {"id": self.settings.model_name, "object": "model", "owned_by": "regraft"}
        return {**model, "created": self.started, "max_model_len": limit}

    def models(self) -> dict[str, Any]:
        """The one model, in a list."""
        return {"object": "list", "data": [self.model(self.settings.model_name)]}

    def health(self) -> tuple[int, str]:
        """Status and a word."""
        if self.engine.background.fatal_error is not None:
            return 503, "failed"
        return (200, "ok") if self.served.is_open else (503, "draining")

    async def complete(self, body: CompletionBody, request: Request) -> Response:
        """Continues texts."""
        self._check_name(body.model)
        vocab_size, tokenizer = self.engine.model.vocab_size, self.engine.tokenizer
        prompts = [to_token_ids(p, tokenizer, vocab_size) for p in asking.prompts_of(body)]
        fields = asking.logprob_fields(body.logprobs, self.settings)
        fields["max_new_tokens"] = body.max_tokens
        fields["prompt_logprobs"] = body.echo and body.logprobs is not None
        streams = self._begin(body, prompts, fields)
        style = Style(self.settings.model_name, tokenizer)
        return await self._answer(body, request, streams, style, echo=body.echo)

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """Answers in a chat."""
        self._check_name(body.model)
        prompt = asking.chat_prompt(body, self.engine.tokenizer)
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs: true")
        fields = asking.logprob_fields(
            (body.top_logprobs or 0) if body.logprobs else None, self.settings
        )
        limit = body.max_completion_tokens or body.max_tokens
        fields["max_new_tokens"] = limit or asking.room_for(prompt, self.engine)
        streams = self._begin(body, [prompt], fields)
        style = ChatStyle(self.settings.model_name, self.engine.tokenizer)
        return await self._answer(body, request, streams, style)

    def _check_name(self, name: str) -> None:
        if name != self.settings.model_name:
            raise HTTPException(
                404, f"there is no model {name!r}: {self.settings.model_name!r} is served"
            )

    def _begin(
        self, body: Sampling, prompts: list[list[int]], fields: dict[str, Any]
    ) -> list[AsyncTokenStream]:
        self.served.check_room()
        fields |= asking.fields_of(body, self.engine, self.settings, len(prompts))
        fields |= asking.penalties_of(body, prompts)
        return self.served.streams(prompts, timeout=self.settings.request_seconds, **fields)

    async def _answer(
        self,
        body: Sampling,
        request: Request,
        streams: list[AsyncTokenStream],
        style: Style,
        *,
        echo: bool = False,
    ) -> Response:
        wants_logprobs = streams[0].request.params.logprobs
        if body.stream and not echo:
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            events = self._events(streams, style, with_usage, wants_logprobs)
            return EventStream(self._safely(events))
        outputs = await while_connected(request.receive, self._collect(streams))
        pieces = [Piece.of_output(output, wants_logprobs=wants_logprobs) for output in outputs]
        if echo:
            pieces = [self._echoed(output, piece) for output, piece in zip(outputs, pieces)]
        whole = style.whole(pieces, self._usage(streams, body.n))
        if body.stream:  # an echo comes in one piece
            return EventStream(_listed([event(whole), "data: [DONE]\n\n"]))
        return JSONResponse(whole)

    async def _collect(self, streams: Sequence[AsyncTokenStream]) -> list[RequestOutput]:
        async for _ in self._noted(streams):
            pass
        outputs = [stream.output for stream in streams if stream.output is not None]
        for output in outputs:
            check_end(output)
        return outputs

    async def _events(
        self,
        streams: Sequence[AsyncTokenStream],
        style: Style,
        with_usage: bool,
        wants_logprobs: bool,
    ) -> AsyncIterator[str]:
        openings = [style.opening(index) for index in range(len(streams))]
        if openings[0] is not None:
            yield style.chunk([opening for opening in openings if opening is not None])
        async for index, tokens in self._noted(streams):
            output = tokens[-1].output
            if output is not None:
                check_end(output)
            piece = Piece.of_tokens(tokens, wants_logprobs=wants_logprobs)
            if piece.text or piece.finish_reason or wants_logprobs:
                yield style.chunk([style.delta(index, piece)])
        if with_usage:
            n = streams[0].request.params.num_return_sequences
            yield style.chunk([], self._usage(streams, n))
        yield "data: [DONE]\n\n"

    async def _noted(
        self, streams: Sequence[AsyncTokenStream]
    ) -> AsyncIterator[tuple[int, list[Any]]]:
        """What the streams make, with their times noted."""
        waiting = set(range(len(streams)))
        try:
            async for index, tokens in merged(streams):
                if index in waiting:
                    waiting.remove(index)
                    self.metrics.first_token(time.perf_counter() - streams[index].request.created)
                yield index, tokens
        finally:
            for stream in streams:
                seconds = time.perf_counter() - stream.request.created
                self.metrics.ended(stream.request, seconds)

    async def _safely(self, events: AsyncIterator[str]) -> AsyncIterator[str]:
        """The events; an error in their midst is the last of them, since the status is sent by then."""
        try:
            async for one in events:
                yield one
        except (HTTPException, EngineFailedError, TextError, TimeoutError) as problem:
            yield event(body_of(problem)[1])

    def _echoed(self, output: RequestOutput, piece: Piece) -> Piece:
        text = decode(self.engine.tokenizer, output.prompt_token_ids, skip_special_tokens=False)
        wanted = piece.logprobs is not None
        return piece.after(Piece.of_prompt(output, text, wants_logprobs=wanted))

    def _usage(self, streams: Sequence[AsyncTokenStream], n: int) -> dict[str, int]:
        requests = [stream.request for stream in streams]
        prompts = sum(request.num_prompt for request in requests[::n])
        return usage(
            prompts, sum(len(stream.output.token_ids) for stream in streams if stream.output)
        )


async def _listed(events: list[str]) -> AsyncIterator[str]:
    for one in events:
        yield one
