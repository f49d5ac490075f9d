"""Tokens that the device has chosen and the host has not read yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .request import Request


class Pending:
    """What a step chose: a token and its log-probability for each request, at a position of its tokens.

    On a GPU the copy to the host is under way when this is made; `read` waits for it and for nothing behind it.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        positions: Sequence[int],
        tokens: torch.Tensor,
        logprobs: torch.Tensor,
    ) -> None:
        self._requests = requests
        self._positions = positions
        both = torch.stack([tokens.double(), logprobs.double()])  # exact, and one copy for both
        self._done: torch.cuda.Event | None = None
        self._values = both
        if both.is_cuda:
            self._values = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
            self._values.copy_(both, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    @property
    def needs_host(self) -> bool:
        """Whether a request's next token depends on all before it, so that they must be read first."""
        return any(request.processors is not None for request in self._requests)

    def read(self) -> Iterator[tuple[Request, int, int, float]]:
        """Each request with position, token and log-probability."""
        if self._done is not None:
            self._done.synchronize()
        tokens, logprobs = self._values.tolist()
        return zip(self._requests, self._positions, map(int, tokens), logprobs)
