"""64 concurrent HTTP streams, and what share of a step is spent outside the model.

    python examples/serve_load.py                        # SmolLM2-135M-Instruct on the CPU
    python examples/serve_load.py --streams 16 --new 8

Clients are a process of their own. Counted as outside the model is all that passes between the model's calls from the
first to the last of them: planning, sampling, text, HTTP, and waiting for the interpreter's lock. In CPU time, all that
this process uses beside the model's calls. Each stream is compared with what the engine says without HTTP.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import _smollm2
import torch
from _chats import CHATS

import regraft
from regraft.runtime.serve.server import make_server
from regraft.runtime.serve.settings import ServeSettings


class Watch:
    """Times the calls of an engine's model."""

    def __init__(self, engine: regraft.Engine) -> None:
        self._forward = engine.model.forward
        engine.model.forward = self.call  # type: ignore[method-assign]
        self.reset()

    def reset(self) -> None:
        """From the next call on."""
        self.calls, self.tokens, self.wall, self.cpu = 0, 0, 0.0, 0.0
        self.begin = self.end = self.cpu_begin = self.cpu_end = 0.0

    def call(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The model's call."""
        begin, cpu = time.perf_counter(), time.process_time()
        if not self.calls:
            self.begin, self.cpu_begin = begin, cpu
        own = time.thread_time()
        logits = self._forward(inputs)
        self.cpu += time.thread_time() - own
        self.end, self.cpu_end = time.perf_counter(), time.process_time()
        self.wall += self.end - begin
        self.calls += 1
        self.tokens += inputs["input_ids"].shape[1]
        return logits

    def report(self) -> str:
        """Seconds a step inside and outside of the model."""
        wall, cpu = self.end - self.begin, self.cpu_end - self.cpu_begin
        return "\n".join(
            f"outside the model {(whole - inside) / whole:.1%} of {name}: "
            f"{(whole - inside) / self.calls * 1e3:.1f} of {whole / self.calls * 1e3:.1f} ms a step"
            for name, whole, inside in (("the wall", wall, self.wall), ("CPU time", cpu, self.cpu))
        )


def main() -> None:
    """Serve, load, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a hub id or a folder; by default SmolLM2-135M")
    parser.add_argument("--streams", type=int, default=64, metavar="N")
    parser.add_argument("--new", type=int, default=32, metavar="N", help="tokens of each answer")
    parser.add_argument("--logprobs", action="store_true", help="ask for log-probabilities as well")
    arguments = parser.parse_args()
    # One thread: the CPU time of the model's calls is then that of the thread that makes them.
    torch.set_num_threads(1)
    model, tokenizer = _smollm2.load(arguments.model)
    count, new = arguments.streams, arguments.new
    chats = [CHATS[number % len(CHATS)] for number in range(count)]
    with regraft.wrap(
        model, tokenizer=tokenizer, validate="off", cache_tokens=1024 * count, max_requests=count
    ) as engine:
        expected = engine.generate(
            [prompt_of(tokenizer, chat) for chat in chats], max_new_tokens=new, do_sample=False
        )
        watch = Watch(engine)
        with serving(engine) as address:
            answers = load(address, chats, new, logprobs=arguments.logprobs)
        same = sum(text == output.text for (text, _), output in zip(answers, expected))
        first = sorted(seconds for _, seconds in answers)
    print(f"{count} streams, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
    print(f"{watch.calls} steps, {watch.tokens / watch.calls:.1f} tokens each")
    print(watch.report())
    print(f"first token after {first[count // 2]:.2f} s (median)")
    print(f"{same} of {count} streams say what the engine says by itself")


def prompt_of(tokenizer: Any, chat: str) -> list[int]:
    """Token ids of a chat with one message."""
    messages = [{"role": "user", "content": chat}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return list(ids)


@contextmanager
def serving(engine: regraft.Engine) -> Iterator[str]:
    """A server over the engine in a thread; its address."""
    server = make_server(engine, ServeSettings("model", port=0))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def load(address: str, chats: list[str], new: int, *, logprobs: bool) -> list[tuple[str, float]]:
    """All chats at once, from another process; see `ask`."""
    bodies = [
        {
            "model": "model", "messages": [{"role": "user", "content": chat}], "max_tokens": new,
            "temperature": 0, "stream": True, "logprobs": logprobs,
        }
        for chat in chats
    ]  # fmt: skip
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(ask_all, (address, bodies))


def ask_all(address: str, bodies: list[dict[str, Any]]) -> list[tuple[str, float]]:
    """Every call in a thread of its own."""
    with ThreadPoolExecutor(len(bodies)) as threads:
        return list(threads.map(lambda body: ask(address, body), bodies))


def ask(address: str, body: dict[str, Any]) -> tuple[str, float]:
    """One stream: its text, and the seconds up to its first token."""
    url, data = f"{address}/v1/chat/completions", json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    begin, first, text = time.perf_counter(), 0.0, ""
    with urllib.request.urlopen(request, timeout=600) as stream:
        for line in stream:
            if not line.startswith(b"data: {"):
                continue
            (choice,) = json.loads(line[6:])["choices"]
            text += choice["delta"].get("content") or ""
            first = first or (time.perf_counter() - begin if text else 0.0)
    return text, first


if __name__ == "__main__":
    main()
