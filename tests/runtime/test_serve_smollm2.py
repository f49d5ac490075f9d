"""SmolLM2-135M-Instruct over HTTP, as the real `openai` client sees it: what is said is what the model alone says.

The reference is the model's own forward without a cache, over the whole text at once.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

import regraft
from regraft.rewriter.validate import reference_logits
from tests.runtime.engines import assert_idle
from tests.runtime.servers import running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.xdist_group("smollm2")]

LOGITS = 2e-3
"""Largest difference of a logit or log-probability to the plain forward (float32, 30 layers)."""
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ASKED = {"model": "toy", "messages": QUESTION, "max_tokens": 12, "temperature": 0}


def demo_model() -> tuple[Any, Any]:
    """The examples' own, from its wheel."""
    path = Path(__file__).parents[2] / "examples" / "_smollm2.py"
    spec = importlib.util.spec_from_file_location("_smollm2", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load()


class Served:
    """The model, its engine, and a client of the server over it."""

    def __init__(self, model: Any, tokenizer: Any, engine: regraft.Engine, client: Any) -> None:
        self.model, self.tokenizer, self.engine, self.client = model, tokenizer, engine, client

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """What the chat template makes of messages."""
        ids = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        return list(ids)

    def logprobs(self, prompt: list[int], made: list[int]) -> torch.Tensor:
        """What the plain forward gives before each of the made tokens: float32 [len(made), vocab]."""
        (logits,) = reference_logits(self.model, [[*prompt, *made]])
        return logits[len(prompt) - 1 : -1].log_softmax(-1)

    def check_greedy(self, prompt: list[int], made: list[int]) -> torch.Tensor:
        """Each token is the likeliest, as far as rounding tells; their log-probabilities."""
        expected = self.logprobs(prompt, made)
        chosen = expected.gather(-1, torch.tensor(made)[:, None])[:, 0]
        assert (expected.amax(-1) - chosen).max() <= LOGITS
        return chosen

    def ids(self, logprobs: Any) -> list[int]:
        """The tokens of an answer, told by their bytes."""
        texts = {
            self.tokenizer.decode([i], clean_up_tokenization_spaces=False): i
            for i in range(len(self.tokenizer))
        }
        return [texts[entry.token] for entry in logprobs.content]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    model, tokenizer = demo_model()
    engine = regraft.wrap(
        model, tokenizer=tokenizer, cache_tokens=8192, max_requests=16, prefix_cache=True, validate="off"
    )  # fmt: skip
    with running(engine) as (_, address):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="k", max_retries=0, timeout=600)
        yield Served(model, tokenizer, engine, client)
        client.close()
    assert_idle(engine)


def pieces(chunks: list[Any]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def test_a_chat_is_what_the_model_says(served: Served) -> None:
    answer = served.client.chat.completions.create(**ASKED, logprobs=True, top_logprobs=3)
    (choice,) = answer.choices
    assert "Paris" in choice.message.content
    assert choice.message.role == "assistant"
    prompt = served.prompt(QUESTION)  # SmolLM2's template begins with a system message of its own
    assert "helpful AI assistant" in served.tokenizer.decode(prompt)
    made = served.ids(choice.logprobs)
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(made)
    chosen = served.check_greedy(prompt, made)
    told = torch.tensor([entry.logprob for entry in choice.logprobs.content])
    assert (told - chosen).abs().max() <= LOGITS
    best = served.logprobs(prompt, made).topk(3).values
    top = torch.tensor([[t.logprob for t in e.top_logprobs] for e in choice.logprobs.content])
    assert (top - best).abs().max() <= LOGITS


def test_a_stream_joins_to_the_answer(served: Served) -> None:
    whole = served.client.chat.completions.create(**ASKED).choices[0].message.content
    before = served.engine.stats.prefix_hit_tokens
    first, *chunks, last = served.client.chat.completions.create(
        **ASKED, stream=True, stream_options={"include_usage": True}
    )
    assert first.choices[0].delta.role == "assistant"
    assert pieces(chunks) == whole
    assert sum(bool(pieces([chunk])) for chunk in chunks) > 3
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    assert last.choices == []
    assert last.usage.prompt_tokens == len(served.prompt(QUESTION))
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens
    assert (
        served.engine.stats.prefix_hit_tokens > before
    )  # the answer was made behind its cached prompt


def test_system_messages_and_turns_go_through_the_template(served: Served) -> None:
    messages = [
        {"role": "system", "content": "Answer in one word."},
        *QUESTION,
        {"role": "assistant", "content": "Paris"},
        {"role": "user", "content": "And of Italy?"},
    ]
    answer = served.client.chat.completions.create(**{**ASKED, "messages": messages}, logprobs=True)
    prompt = served.prompt(messages)
    assert answer.usage.prompt_tokens == len(prompt)
    served.check_greedy(prompt, served.ids(answer.choices[0].logprobs))


def test_a_plain_completion_with_its_prompt(served: Served) -> None:
    text = "The quick brown fox jumps over the lazy"
    answer = served.client.completions.create(
        model="toy", prompt=text, max_tokens=4, temperature=0, echo=True, logprobs=0
    )
    (choice,) = answer.choices
    ids = served.tokenizer(text)["input_ids"]
    assert choice.text.startswith(f"{text} dog")
    logits, told = reference_logits(served.model, [ids])[0], choice.logprobs.token_logprobs
    expected = logits[:-1].log_softmax(-1).gather(-1, torch.tensor(ids)[1:, None])[:, 0]
    assert told[0] is None
    assert (torch.tensor(told[1 : len(ids)]) - expected).abs().max() <= LOGITS


def test_a_stop_string_ends_an_answer(served: Served) -> None:
    whole = served.client.chat.completions.create(**ASKED).choices[0].message.content
    stop = "Par"  # within a token
    answer = served.client.chat.completions.create(**ASKED, stop=[stop])
    assert answer.choices[0].message.content == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    chunks = list(served.client.chat.completions.create(**ASKED, stop=[stop], stream=True))
    assert pieces(chunks) == whole[: whole.index(stop)]


def test_a_seed_gives_the_same_whatever_else_runs(served: Served) -> None:
    asked = {**ASKED, "temperature": 0.9, "seed": 11, "n": 2}

    def texts(**fields: Any) -> list[str]:
        answer = served.client.chat.completions.create(**{**asked, **fields})
        return [choice.message.content for choice in answer.choices]

    alone = texts()
    assert alone[0] != alone[1]
    others = [threading.Thread(target=texts, kwargs={"seed": seed}) for seed in range(4)]
    for other in others:
        other.start()
    beside = texts()
    for other in others:
        other.join()
    assert beside == alone
    assert texts(seed=12) != alone


def test_an_answer_in_a_json_schema(served: Served) -> None:
    pytest.importorskip("llguidance", reason="an optional extra")
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "continent": {"enum": ["Europe", "Asia", "Africa"]},
            "people": {"type": "integer", "minimum": 1, "maximum": 99999999},
        },
        "required": ["city", "continent", "people"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    asked = {**ASKED, "max_tokens": 80, "response_format": form}
    (choice,) = served.client.chat.completions.create(**asked).choices
    found = json.loads(choice.message.content)
    assert found.keys() == {"city", "continent", "people"}
    assert found["continent"] in schema["properties"]["continent"]["enum"]
    assert choice.finish_reason == "stop"
    assert (
        pieces(list(served.client.chat.completions.create(**asked, stream=True)))
        == choice.message.content
    )


def test_sixteen_streams_at_once(served: Served) -> None:
    """Each is what it is alone, token by token: greedy, and where two tokens are as likely, either of them."""
    cities = ["France", "Italy", "Spain", "Japan", "Egypt", "Peru", "Kenya", "Norway"] * 2
    asked = [[{"role": "user", "content": f"What is the capital of {city}?"}] for city in cities]
    told: list[Any] = [None] * len(asked)

    def ask(index: int) -> None:
        stream = served.client.chat.completions.create(
            **{**ASKED, "messages": asked[index]}, stream=True, logprobs=True
        )
        told[index] = [
            e for chunk in stream for c in chunk.choices if c.logprobs for e in c.logprobs.content
        ]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for messages, entries in zip(asked, told):
        made = served.ids(type("Logprobs", (), {"content": entries}))
        chosen = served.check_greedy(served.prompt(messages), made)
        assert (torch.tensor([e.logprob for e in entries]) - chosen).abs().max() <= LOGITS
