"""A server over the toy model, running in a thread of the test."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

from regraft.runtime.serve.server import make_server
from regraft.runtime.serve.settings import ServeSettings
from tests.runtime.engines import make_engine
from tests.runtime.tokenizers_made_here import byte_tokenizer
from tests.runtime.toy import ToyModel

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool['function']['name'] }}]{% endfor %}"
    "{% for message in messages %}{% if message['role'] == 'bad' %}{{ raise_exception('no bad') }}"
    "{% endif %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def chat_tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def toy_engine(**fields):
    sizes = {"max_batch_tokens": 256, "cache_tokens": 4096, "max_requests": 64}
    model = ToyModel(vocab_size=257, max_positions=512)
    return make_engine(model, tokenizer=chat_tokenizer(), **{**sizes, **fields})


def slow(engine, seconds=0.005):
    """Makes each step take so long at least."""
    forward = engine.model.forward

    def delayed(inputs):
        time.sleep(seconds)
        return forward(inputs)

    engine.model.forward = delayed


@contextmanager
def running(engine, **settings):
    """Yields the server and its address; ends it as SIGTERM does."""
    server = make_server(engine, ServeSettings("toy", port=0, **settings))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield server, f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=60)
        assert not thread.is_alive()
        assert not engine.background.is_alive
