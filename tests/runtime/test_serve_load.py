"""Random load through HTTP: nothing is lost or crossed, and nothing grows.

REGRAFT_SOAK_SECONDS makes it as long as one likes; the suite runs it for a moment.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random

import httpx
import psutil

from tests.runtime.engines import assert_idle, make_prompts
from tests.runtime.servers import running, toy_engine

SECONDS = float(os.environ.get("REGRAFT_SOAK_SECONDS", "4"))
CLIENTS = 64
PROMPTS = make_prompts(24, seed=11, longest=90)
LONGEST = 40


def alone():
    """What each prompt comes to by itself, greedily and sampled."""
    engine = toy_engine()
    sampling = {"do_sample": True, "temperature": 30.0, "top_k": 0, "top_p": 1.0, "seed": 3}
    expected = {}
    for index, prompt in enumerate(PROMPTS):
        for name, fields in (("greedy", {}), ("sampled", sampling)):
            (out,) = engine.generate([prompt], max_new_tokens=LONGEST, **fields)
            expected[index, name] = out
    return expected


async def ask(client, rng, expected, counts):
    """One call of random kind; its answer is checked against the one that the prompt gets alone."""
    index, kind = rng.randrange(len(PROMPTS)), rng.choice(["greedy", "sampled"])
    count = rng.randint(1, LONGEST)
    body = {"model": "toy", "prompt": PROMPTS[index], "max_tokens": count, "logprobs": 0}
    body |= {"temperature": 0} if kind == "greedy" else {"temperature": 30.0, "seed": 3}
    known = expected[index, kind].logprobs[:count]
    what = rng.random()
    if what < 0.05:
        answer = await client.post("/v1/completions", json={**body, "prompt": [999]})
        assert answer.status_code == 400
        counts["refused"] += 1
    elif what < 0.5:
        answer = await client.post("/v1/completions", json=body)
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
            counts["full"] += 1
            return
        (choice,) = answer.json()["choices"]
        assert choice["logprobs"]["token_logprobs"] == known
        counts["whole"] += 1
    else:
        await ask_streaming(client, rng, {**body, "stream": True}, known, counts)


async def ask_streaming(client, rng, body, known, counts):
    leaves_after = rng.randint(1, 5) if rng.random() < 0.2 else None
    logprobs = []
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code == 429:
            counts["full"] += 1
            return
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                logprobs += choice["logprobs"]["token_logprobs"]
                if leaves_after is not None and len(logprobs) >= leaves_after:
                    assert logprobs == known[: len(logprobs)]
                    counts["left"] += 1
                    return
    assert logprobs == known
    counts["streamed"] += 1


def test_random_load():
    expected = alone()
    engine = toy_engine(cache_tokens=1600, max_requests=48, prefix_cache=True)
    counts = dict.fromkeys(["whole", "streamed", "left", "refused", "full"], 0)
    sizes = []

    async def load(address):
        limits = httpx.Limits(max_connections=CLIENTS)
        loop = asyncio.get_running_loop()
        async with httpx.AsyncClient(base_url=address, limits=limits, timeout=120) as client:
            for part in range(4):  # the size after the first part is what nothing may grow beyond
                end = loop.time() + SECONDS / 4

                async def use(seed, end=end):
                    rng = random.Random(seed)
                    while loop.time() < end:
                        await ask(client, rng, expected, counts)

                await asyncio.gather(*(use(part * CLIENTS + i) for i in range(CLIENTS)))
                gc.collect()
                sizes.append(psutil.Process().memory_info().rss / 2**20)

    with running(engine, max_waiting=12) as (_, address):
        asyncio.run(load(address))
    assert_idle(engine)
    assert all(counts.values()), counts
    assert sizes[-1] - sizes[0] < 24, sizes
    if "REGRAFT_SOAK_SECONDS" in os.environ:
        print(counts, [round(size) for size in sizes], engine.stats)
