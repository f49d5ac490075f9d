"""What a server allows and where it listens."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass


@dataclass(frozen=True)
class ServeSettings:
    """Checked when made: a wrong one is a ValueError with value and fix."""

    model_name: str
    """What clients call the model."""

    host: str = "127.0.0.1"
    """Address to listen on (default: this machine alone; any other needs an `api_key`)."""

    port: int = 8000
    """Port to listen on (default 8000; 0: any free one)."""

    api_key: str | None = None
    """What clients have to send as `Authorization: Bearer ...` (default None: nothing)."""

    max_body_bytes: int = 4 * 2**20
    """Largest body of a request (bytes; default 4 MiB)."""

    max_waiting: int = 256
    """Requests that may wait for their first step; one more is answered with 429 (default 256)."""

    max_choices: int = 64
    """Most prompts times `n` of one call (default 64)."""

    max_top_logprobs: int = 20
    """Most likeliest tokens at each place (default 20)."""

    max_stop_strings: int = 16
    """Most stop strings of one call (default 16)."""

    request_seconds: float = 600.0
    """How long one call may take before it is cancelled (seconds; default 600)."""

    stall_seconds: float = 60.0
    """How long a client may leave its tokens unread before its call is cancelled (seconds; default 60)."""

    drain_seconds: float = 30.0
    """How long calls under way may go on after a signal to end (seconds; default 30)."""

    def __post_init__(self) -> None:
        if not self.is_local and not self.api_key:
            raise ValueError(
                f"host={self.host!r} is open to other machines: give an api_key too, or listen on 127.0.0.1"
            )
        counts = ("max_body_bytes", "max_waiting", "max_choices", "max_stop_strings")
        for name in (*counts, "request_seconds", "stall_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} is not above 0")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # another name: it may be anybody's
            return False
