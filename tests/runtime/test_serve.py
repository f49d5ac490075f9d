"""The HTTP server as the real `openai` client and others see it."""

from __future__ import annotations

import json
import threading
import time

import httpx
import openai
import pytest

from regraft.runtime.serve.settings import ServeSettings
from tests.runtime.engines import assert_idle
from tests.runtime.servers import chat_tokenizer, running, slow, toy_engine

TOKENIZER = chat_tokenizer()
MESSAGES = [{"role": "system", "content": "Be."}, {"role": "user", "content": "Who?"}]
CHAT_TEXT = "<system>Be.\n<user>Who?\n<assistant>"


def make_client(address, **options):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="k", max_retries=0, **options)


@pytest.fixture(scope="module")
def served():
    engine = toy_engine()
    with running(engine) as (_, address):
        client = make_client(address)
        yield engine, address, client
        client.close()
    assert_idle(engine)


def expected(prompt, count, **fields):
    """What the engine says by itself."""
    ids = TOKENIZER(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    (out,) = toy_engine().generate([ids], max_new_tokens=count, **fields)
    return out


def test_completions(served):
    _, _, client = served
    answer = client.completions.create(model="toy", prompt="hello", max_tokens=9, temperature=0)
    out = expected("hello", 9)
    assert answer.choices[0].text == out.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs is None
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 5,
        "completion_tokens": 9,
        "total_tokens": 14,
    }
    stream = client.completions.create(
        model="toy", prompt="hello", max_tokens=9, temperature=0, stream=True
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == out.text
    assert chunks[-1].choices[0].finish_reason == "length"
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("prompt", [["one", "two"], [[1, 2, 3], [4]], [1, 2, 3]])
def test_prompts_of_each_form(served, prompt):
    _, _, client = served
    answer = client.completions.create(model="toy", prompt=prompt, max_tokens=4, temperature=0, n=2)
    prompts = prompt if isinstance(prompt[0], (str, list)) else [prompt]
    texts = [expected(one, 4).text for one in prompts for _ in range(2)]
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == list(range(len(texts)))
    assert answer.usage.completion_tokens == 4 * len(texts)
    assert answer.usage.prompt_tokens == sum(
        len(TOKENIZER(p)["input_ids"]) if isinstance(p, str) else len(p) for p in prompts
    )


def test_chat(served):
    _, _, client = served
    answer = client.chat.completions.create(
        model="toy", messages=MESSAGES, max_tokens=12, temperature=0
    )
    out = expected(CHAT_TEXT, 12)
    assert answer.choices[0].message.content == out.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == len(CHAT_TEXT)
    stream = client.chat.completions.create(
        model="toy",
        messages=MESSAGES,
        max_completion_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    first, *chunks, last = list(stream)
    assert first.choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == out.text
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.choices == []
    assert last.usage.completion_tokens == 12


def test_tools_and_parts_go_through_the_template(served):
    _, _, client = served
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ]
    asked = {"model": "toy", "messages": parts, "max_tokens": 3, "temperature": 0, "tools": tools}
    answer = client.chat.completions.create(**asked)
    assert answer.choices[0].message.content == expected("[look]<user>ab\n<assistant>", 3).text
    answer = client.chat.completions.create(**asked, tool_choice="none")
    assert answer.usage.prompt_tokens == len("<user>ab\n<assistant>")


def test_without_a_limit_a_chat_goes_on_as_long_as_there_is_room(served):
    _, _, client = served
    answer = client.chat.completions.create(model="toy", messages=MESSAGES, temperature=0)
    assert answer.usage.total_tokens == 512


def test_seeds_and_several_choices(served):
    _, _, client = served
    asked = {
        "model": "toy",
        "prompt": "x",
        "max_tokens": 12,
        "temperature": 60.0,
        "n": 3,
        "seed": 5,
    }
    asked["temperature"] = 60.0
    first, second = (client.completions.create(**asked).choices for _ in range(2))
    assert [c.text for c in first] == [c.text for c in second]
    assert len({c.text for c in first}) == 3
    texts = dict.fromkeys(range(3), "")
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [c.text for c in first]


def test_stop_strings(served):
    _, _, client = served
    out = expected("hello", 40)
    stop = out.text[10:12]
    text = out.text[: out.text.find(stop)]
    asked = {"model": "toy", "prompt": "hello", "max_tokens": 40, "temperature": 0, "stop": [stop]}
    (choice,) = client.completions.create(**asked).choices
    assert (choice.text, choice.finish_reason) == (text, "stop")
    chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_logprobs(served):
    _, _, client = served
    out = expected("hello", 5, top_logprobs=3, prompt_logprobs=True)
    asked = {"model": "toy", "max_tokens": 5, "temperature": 0}
    answer = client.completions.create(prompt="hello", logprobs=3, echo=True, **asked)
    got = answer.choices[0].logprobs
    assert answer.choices[0].text == "hello" + out.text
    (streamed,) = client.completions.create(
        prompt="hello", logprobs=3, echo=True, stream=True, **asked
    )
    assert streamed.choices == answer.choices
    assert got.token_logprobs == [*out.prompt_logprobs, *out.logprobs]
    assert got.tokens[:5] == list("hello")
    best = [max(top.values()) for top in got.top_logprobs[5:]]
    assert best == [top[0][1] for top in out.top_logprobs]
    answer = client.chat.completions.create(
        messages=MESSAGES, logprobs=True, top_logprobs=2, **asked
    )
    chat = expected(CHAT_TEXT, 5, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in content] == chat.logprobs
    assert [[t.logprob for t in e.top_logprobs] for e in content] == [
        [value for _, value in top] for top in chat.top_logprobs
    ]
    streamed = []
    for chunk in client.chat.completions.create(
        messages=MESSAGES, logprobs=True, stream=True, **asked
    ):
        for choice in chunk.choices:
            streamed += [e.logprob for e in choice.logprobs.content] if choice.logprobs else []
    assert streamed == chat.logprobs


def test_penalties_and_biases(served):
    _, _, client = served
    asked = {"model": "toy", "prompt": "ab", "max_tokens": 6, "temperature": 0}
    answer = client.completions.create(**asked, logit_bias={"120": 100, "121": -100})
    plain = client.completions.create(**asked)
    assert answer.choices[0].text != plain.choices[0].text
    once = client.completions.create(**asked, presence_penalty=2.0, frequency_penalty=2.0)
    assert once.choices[0].text  # the toy's scores are far apart: the processor has its own test


def test_models_health_and_metrics(served):
    engine, address, client = served
    (model,) = client.models.list().data
    assert model.id == "toy"
    assert client.models.retrieve("toy") == model
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
        client.models.retrieve("other")
    assert httpx.get(f"{address}/health").json() == {"status": "ok"}
    client.completions.create(model="toy", prompt="a", max_tokens=3)
    text = httpx.get(f"{address}/metrics").text
    assert 'regraft_http_calls_total{path="/v1/completions",status="200"}' in text
    assert f"regraft_engine_computed_tokens_total {engine.stats.computed_tokens:.1f}" in text
    assert 'regraft_requests_total{reason="length"}' in text
    assert "regraft_first_token_seconds_count" in text


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"model": "other"}, 404, "there is no model 'other'"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [999]}, 400, "token 999 at index 0 of the prompt is outside the vocabulary"),
        ({"max_tokens": 5000}, 400, "more than the 512 positions of the model"),
        ({"max_tokens": 0}, 400, "max_tokens: Input should be greater than or equal to 1"),
        ({"temprature": 1}, 400, "temprature: Extra inputs are not permitted"),
        ({"n": 65}, 400, "at most 64 are allowed"),
        ({"logprobs": 21}, 400, "at most 20 are allowed"),
        ({"stop": ["a"] * 17}, 400, "17 stop strings"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias names 'x'"),
        ({"logit_bias": {"300": 1}}, 400, "token 300"),
        ({"top_p": 0}, 400, "top_p"),
        ({"response_format": {"type": "json_schema"}}, 400, "has no json_schema"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong(served, fields, status, message):
    _, address, _ = served
    body = {"model": "toy", "prompt": "a", **fields}
    answer = httpx.post(f"{address}/v1/completions", json=body)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]


def test_a_bad_chat_is_told_what_is_wrong(served):
    _, address, client = served
    with pytest.raises(openai.BadRequestError, match=r"the chat template refuses.*no bad"):
        client.chat.completions.create(model="toy", messages=[{"role": "bad", "content": "x"}])
    with pytest.raises(openai.BadRequestError, match="text alone is served"):
        client.chat.completions.create(
            model="toy",
            messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        )
    half = b'{"type":"text","text":"\\ud800"}'
    chat = b'{"model":"toy","messages":[{"role":"user","content":[' + half + b"]}]}"
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{address}/v1/chat/completions", content=chat, headers=headers)
    assert answer.status_code == 400
    assert "no Unicode text" in answer.json()["error"]["message"]
    answer = httpx.post(f"{address}/v1/chat/completions", content=b"{nonsense", headers=headers)
    assert answer.status_code == 400
    assert httpx.get(f"{address}/nowhere").json()["error"]["type"] == "invalid_request_error"


def test_structured_answers(served):
    pytest.importorskip("llguidance", reason="an optional extra")
    _, _, client = served
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="toy",
        messages=MESSAGES,
        temperature=0.01,
        max_tokens=80,
        response_format={"type": "json_schema", "json_schema": {"name": "t", "schema": schema}},
    )
    assert set(json.loads(answer.choices[0].message.content)) == {"a", "b"}


def test_sizes_and_keys_are_guarded():
    engine = toy_engine()
    with running(engine, api_key="secret", max_body_bytes=500) as (_, address):
        url = f"{address}/v1/completions"
        body = {"model": "toy", "prompt": "a", "max_tokens": 2}
        assert httpx.post(url, json=body).status_code == 401
        assert httpx.get(f"{address}/metrics").status_code == 401
        assert httpx.get(f"{address}/health").status_code == 200
        headers = {"Authorization": "Bearer secret"}
        assert httpx.post(url, json=body, headers=headers).status_code == 200
        long = json.dumps({**body, "prompt": "a" * 600}).encode()
        assert httpx.post(url, content=long, headers=headers).status_code == 413
        parts = (long[i : i + 50] for i in range(0, len(long), 50))  # not announced
        assert httpx.post(url, content=parts, headers=headers).status_code == 413
    with pytest.raises(ValueError, match=r"host='0.0.0.0' is open to other machines: give an api"):
        ServeSettings("toy", host="0.0.0.0")


def test_a_client_that_goes_away_frees_its_pages_within_a_step():
    engine = toy_engine()
    slow(engine, 0.01)
    body = {"model": "toy", "prompt": "abc", "max_tokens": 400, "temperature": 0}
    with running(engine) as (_, address):
        url = f"{address}/v1/completions"
        for stream in (True, False):
            with httpx.Client() as client:
                with client.stream("POST", url, json={**body, "stream": True}) as answer:
                    lines = answer.iter_lines()  # kept: dropped, it would close the connection
                    next(lines)
                    assert len(engine.live_requests()) == 1
                if not stream:
                    with pytest.raises(httpx.ReadTimeout):
                        client.post(url, json=body, timeout=0.1)
            while engine.live_requests():  # the news of it takes its time on a busy machine
                time.sleep(0.0005)
            steps = engine.model.num_steps
            while engine._loop.scheduler.running:
                time.sleep(0.0005)
            assert engine.model.num_steps - steps <= 1
        assert_idle(engine)


def test_a_full_queue_says_when_to_come_again():
    engine = toy_engine(max_requests=2)
    slow(engine, 0.01)
    with running(engine, max_waiting=2) as (_, address):
        url = f"{address}/v1/completions"
        body = {"model": "toy", "prompt": "abc", "max_tokens": 40, "temperature": 0}
        answers = []

        def ask():
            answers.append(httpx.post(url, json=body, timeout=60))

        threads = [threading.Thread(target=ask) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        full = [a for a in answers if a.status_code == 429]
        good = [a for a in answers if a.status_code == 200]
        assert len(full) + len(good) == 16
        assert full
        assert len(good) >= 4
        assert all(int(answer.headers["Retry-After"]) >= 1 for answer in full)
        assert full[0].json()["error"]["code"] == "queue_full"
        assert {a.json()["choices"][0]["text"] for a in good} == {expected("abc", 40).text}


def test_a_call_may_take_so_long_and_no_longer():
    engine = toy_engine()
    slow(engine)
    body = {"model": "toy", "prompt": "abc", "max_tokens": 400, "temperature": 0}
    with running(engine, request_seconds=0.2) as (_, address):
        url = f"{address}/v1/completions"
        answer = httpx.post(url, json=body)
        assert answer.status_code == 504
        with httpx.stream("POST", url, json={**body, "stream": True}) as stream:
            last = [line for line in stream.iter_lines() if line][-1]
        assert "took too long" in last
        assert httpx.post(url, json={**body, "max_tokens": 2}).status_code == 200
        while engine.live_requests():
            time.sleep(0.001)


def test_the_end_lets_calls_finish():
    engine = toy_engine()
    slow(engine)
    body = {"model": "toy", "prompt": "abc", "max_tokens": 60, "temperature": 0}
    with running(engine) as (server, address):
        got = []
        thread = threading.Thread(
            target=lambda: got.append(
                httpx.post(f"{address}/v1/completions", json=body, timeout=60)
            )
        )
        thread.start()
        while not engine.live_requests():
            time.sleep(0.001)
        server.should_exit = True
        thread.join()
    assert got[0].json()["choices"][0]["text"] == expected("abc", 60).text


def test_a_fatal_error_reaches_every_client():
    engine = toy_engine()
    slow(engine)
    body = {"model": "toy", "prompt": "abc", "max_tokens": 300, "temperature": 0}
    with running(engine) as (_, address):
        url = f"{address}/v1/completions"
        got = []

        def ask():
            got.append(httpx.post(url, json=body, timeout=60))

        threads = [threading.Thread(target=ask) for _ in range(5)]
        for thread in threads:
            thread.start()
        with httpx.stream("POST", url, json={**body, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            while len(engine.live_requests()) < 6:
                time.sleep(0.001)
            engine.model.fails_in = 1
            rest = [line for line in lines if line]
        for thread in threads:
            thread.join()
        assert {answer.status_code for answer in got} == {503}
        assert "ArithmeticError: the toy broke" in rest[-1]
        assert "the toy broke" in got[0].json()["error"]["message"]
        assert httpx.get(f"{address}/health").status_code == 503
        assert httpx.post(url, json=body).status_code == 503
    engine.background.fatal_error = None


def test_one_that_fails_fails_alone():
    engine = toy_engine()
    plain = engine.model._rows
    engine.model._rows = lambda t, p, e: plain(t, p, e).masked_fill(t == 7, float("nan"))
    with running(engine) as (_, address):
        url = f"{address}/v1/completions"
        body = {"model": "toy", "prompt": [7], "max_tokens": 3, "temperature": 0}
        answer = httpx.post(url, json=body)
        assert answer.status_code == 500
        assert "are not finite" in answer.json()["error"]["message"]
        with httpx.stream("POST", url, json={**body, "stream": True}) as stream:
            assert "are not finite" in [line for line in stream.iter_lines() if line][-1]
        assert httpx.post(url, json={**body, "prompt": [8]}).status_code == 200


@pytest.mark.parametrize(
    "fields", [{}, {"logprobs": 1}, {"echo": True}, {"stop": "never"}], ids=str
)
def test_one_whose_text_cannot_be_told_fails_alone(fields, monkeypatch):
    engine = toy_engine()
    tokens, other = (engine.model.continue_greedily([start], 4) for start in (7, 8))
    assert tokens[2] not in other
    decode = engine.tokenizer.decode

    def raising(token_ids, **options):
        if tokens[2] in token_ids:
            raise OverflowError("out of range")
        return decode(token_ids, **options)

    monkeypatch.setattr(engine.tokenizer, "decode", raising)
    with running(engine) as (_, address):
        url = f"{address}/v1/completions"
        body = {"model": "toy", "prompt": [7], "max_tokens": 4, "temperature": 0, **fields}
        answer = httpx.post(url, json=body)
        assert answer.status_code == 500
        said = "the request failed: the tokenizer raised OverflowError: out of range"
        assert answer.json()["error"]["message"] == said
        if "echo" not in fields:
            with httpx.stream("POST", url, json={**body, "stream": True}) as stream:
                assert said in [line for line in stream.iter_lines() if line][-1]
        good = httpx.post(url, json={**body, "prompt": [8]})
        assert good.status_code == 200
        assert httpx.get(f"{address}/health").status_code == 200
    assert_idle(engine)
