"""Runs the application until a signal ends it."""

from __future__ import annotations

import uvicorn

from regraft.runtime.engine import Engine

from .app import create_app
from .settings import ServeSettings


def make_server(engine: Engine, settings: ServeSettings) -> uvicorn.Server:
    """A server that is not running yet. On SIGTERM or SIGINT it takes no more calls, and lets those
    under way go on for `drain_seconds`.
    """
    config = uvicorn.Config(
        create_app(engine, settings),
        host=settings.host,
        port=settings.port,
        # Longer than clients keep an idle connection: else both may end it as one is taken up again.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
        log_level="info",
        access_log=False,
        server_header=False,
    )
    return uvicorn.Server(config)


def serve(engine: Engine, settings: ServeSettings) -> None:
    """Serves until a signal ends it."""
    make_server(engine, settings).run()
