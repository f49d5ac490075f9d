"""Where the tokens of a request go as they are made."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from tqdm import tqdm

from .output import RequestOutput, StreamToken
from .request import Request


class TokenStream(Iterator[StreamToken]):
    """The tokens of one request, made while they are asked for.

    Several streams of one engine can be read in any order: each sees its own request's tokens
    only. One that is closed, or dropped, before its end cancels its request. `output` is the
    whole result once the stream has ended.
    """

    def __init__(
        self,
        request: Request,
        run_until: Callable[[Callable[[], object]], None],
        cancel: Callable[[Request], None],
    ) -> None:
        self.request_id = request.request_id
        self._request = request
        self._run_until = run_until
        self._cancel = cancel
        self._tokens: deque[StreamToken] = deque()
        self._is_over = False
        request.sink = self._tokens.append

    @property
    def output(self) -> RequestOutput | None:
        """The whole result, None until the request has ended."""
        return self._request.output

    def __next__(self) -> StreamToken:
        while True:
            if self._is_over:
                raise StopIteration
            # Not until it has an output: another thread sets that before the last token is here.
            self._run_until(lambda: self._tokens)
            token = self._tokens.popleft()
            self._is_over = token.output is not None
            if token.token_id is not None:
                return token

    def close(self) -> None:
        """Ends the stream; its request is cancelled if it has not ended."""
        self._cancel(self._request)

    def __del__(self) -> None:
        self.close()


class Collector:
    """Counts the requests of one call that have not ended, and moves its progress bar."""

    def __init__(self, requests: Sequence[Request], *, progress: bool) -> None:
        self.pending = len(requests)
        self.bar = tqdm(
            total=sum(request.params.max_new_tokens for request in requests),
            unit="tok",
            disable=not progress,
        )
        self._budgets = {r.request_id: r.params.max_new_tokens for r in requests}
        for request in requests:
            request.sink = self.add

    def add(self, token: StreamToken) -> None:
        """Notes a token of one of the requests."""
        if token.token_id is not None:
            self.bar.update()
        if token.output is not None:
            self.pending -= 1
            # A request that stopped early makes fewer tokens than the bar was drawn for.
            self.bar.total -= self._budgets[token.request_id] - len(token.output.token_ids)
            self.bar.refresh()
