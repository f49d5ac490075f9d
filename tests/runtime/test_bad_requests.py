"""Whatever a caller gets wrong is told at once, and costs nobody else anything."""

from __future__ import annotations

import threading

import pytest
from transformers import GenerationConfig

from regraft.runtime import scheduler
from regraft.runtime.errors import EngineBusyError, EngineClosedError, RequestError
from tests.runtime.engines import assert_idle, make_engine, make_prompts
from tests.runtime.tokenizers_made_here import byte_tokenizer
from tests.runtime.toy import ToyModel

BAD = [
    ([], {}, "the prompt is empty: give at least one token"),
    ([1, 64], {}, r"token 64 at index 1 of the prompt is outside the vocabulary of 64 \(0 to 63\)"),
    ([-1], {}, "token -1 at index 0"),
    ([1.5], {}, r"the prompt \[1.5\] is no flat list of whole numbers"),
    ([True], {}, "no flat list of whole numbers"),
    ([[1], [2, 3]], {}, "no flat list of whole numbers"),
    (["a"], {}, "no flat list of whole numbers"),
    (None, {}, "the prompt None is no flat list"),
    ("text", {}, "the prompt 'text' is text, and the engine has no tokenizer"),
    ([1] * 201, {"max_new_tokens": 1}, "201 tokens and 1 new ones are more than the 200 positions"),
    ([1] * 190, {"max_new_tokens": 12}, "190 tokens and 12 new ones are more than the 200 posit"),
    ([1] * 90, {"max_new_tokens": 32}, "90 tokens and 32 new ones are more than the 120 tokens of"),
    ([1], {"max_new_tokens": 0}, "max_new_tokens=0"),
    ([1], {"max_new_tokens": -5}, "max_new_tokens=-5"),
    ([1], {"num_beams": 2}, "num_beams=2 is not supported"),
    ([1], {"speed": 2}, "'speed' is no field of GenerationConfig"),
    (
        [1],
        {"eos_token_id": 64},
        r"eos_token_id names token 64, outside the vocabulary of 64 \(0 to",
    ),
    ([1], {"eos_token_id": [3, 64]}, "eos_token_id names token 64"),
    ([1], {"eos_token_id": -2}, r"eos_token_id=\(-2,\): give a token id"),
    ([1], {"pad_token_id": -1}, "pad_token_id=-1: give a token id, or leave it out"),
    ([1], {"pad_token_id": "x"}, "pad_token_id='x': give a token id"),
    ([1], {"bad_words_ids": [[]]}, r"bad_words_ids=\[\[\]\]: give a list of lists .*none empty"),
    ([1], {"bad_words_ids": [[3], []]}, "none empty"),
    ([1], {"bad_words_ids": 5}, "`bad_words_ids` has to be a non-empty list"),
    ([1], {"bad_words_ids": []}, "`bad_words_ids` has to be a non-empty list"),
    ([1], {"generation_config": {"top_k": 1}}, "give a transformers GenerationConfig"),
]


def bad_engine(index):
    """The cache is smaller than the model's limit only where the cache is what is tested."""
    return make_engine(ToyModel(max_positions=200), cache_tokens=120 if index == 11 else 400)


@pytest.mark.parametrize("index", range(len(BAD)))
def test_a_bad_request_is_refused_and_everybody_else_goes_on(index):
    prompt, fields, message = BAD[index]
    engine = bad_engine(index)
    good = make_prompts(2)
    stream = engine.stream(good[0], max_new_tokens=6)
    tokens = [next(stream).token_id for _ in range(2)]
    for call in (engine.add_request, engine.stream):
        with pytest.raises(RequestError, match=message):
            call(prompt, **fields)
    steps = engine.model.num_steps
    with pytest.raises(RequestError, match=message):
        engine.generate([good[1], prompt, good[1]], **fields)
    assert engine.model.num_steps == steps, "something ran before the refusal"
    tokens += [token.token_id for token in stream]
    assert tokens == engine.model.continue_greedily(good[0], 6)
    (output,) = engine.generate(good[1:], max_new_tokens=4)
    assert output.token_ids == engine.model.continue_greedily(good[1], 4)
    assert_idle(engine)


@pytest.mark.parametrize("overlaps", [False, True])
def test_requests_up_to_the_limit_are_served(overlaps):
    """The last new token is chosen and never computed: it takes no place."""
    for tokens in (200, 120):
        model = ToyModel(max_positions=200)
        engine = make_engine(model, cache_tokens=tokens, overlaps=overlaps)
        prompt = [3] * (tokens - 4)
        (output,) = engine.generate([prompt], max_new_tokens=5)
        assert output.token_ids == engine.model.continue_greedily(prompt, 5)
        (output,) = engine.generate([[3] * tokens], max_new_tokens=1)
        assert len(output.token_ids) == 1
        engine.score([[3] * tokens])


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("patience", [0, 3])
def test_requests_of_the_whole_cache_do_not_stop_each_other(patience, overlaps, monkeypatch):
    """Each alone fills it, also where it has to wait for all of the room that it can come to need."""
    monkeypatch.setattr(scheduler, "MOST_PREEMPTIONS", patience)
    engine = make_engine(cache_tokens=40, overlaps=overlaps)
    prompts = make_prompts(6, longest=20)
    outputs = engine.generate(prompts, max_new_tokens=[41 - len(prompt) for prompt in prompts])
    for prompt, output in zip(prompts, outputs):
        assert output.token_ids == engine.model.continue_greedily(prompt, 41 - len(prompt))
    assert (engine.stats.num_preemptions > 0) == (patience > 0)
    assert_idle(engine)


@pytest.mark.parametrize("progress", ["x", 1, None])
def test_progress_is_a_flag(progress):
    with pytest.raises(RequestError, match=f"progress={progress!r}: give True or False"):
        make_engine().generate([[1]], progress=progress)


def test_a_models_own_config_may_name_tokens_that_it_never_makes():
    """Of a larger tokenizer, or -1 for none: as transformers takes them."""
    config = GenerationConfig(eos_token_id=[5000], pad_token_id=-1)
    for given in ({"generation_config": config}, {}):
        engine = make_engine(generation_config=config)
        outputs = [engine.generate([[1]], max_new_tokens=3, **given)[0]]
        name = engine.add_request([1], max_new_tokens=3, eos_token_id=-1, pad_token_id=0)
        outputs += [token.output for token in run(engine) if token.request_id == name]
        for output in outputs:
            assert output.token_ids == engine.model.continue_greedily([1], 3)


def run(engine):
    """The last tokens of the requests that `add_request` made."""
    found = []
    while engine.has_unfinished:
        found += [token for token in engine.step() if token.output is not None]
    return found


@pytest.mark.parametrize("prompts", ["text", [1, 2, 3], {"input_ids": [1]}, None, 5, b"ab"])
def test_a_single_prompt_is_not_a_list_of_prompts(prompts):
    engine = make_engine()
    with pytest.raises(RequestError, match=r"give a list, one item per prompt|list of lists"):
        engine.generate(prompts)
    with pytest.raises(RequestError, match=r"give a list, one item per prompt|list of lists"):
        engine.score(prompts)


def test_an_id_that_is_no_string_is_refused():
    with pytest.raises(RequestError, match="request_id=5 is no str"):
        make_engine().add_request([1], request_id=5)


def test_cancelling_who_is_not_there():
    engine = make_engine()
    with pytest.raises(RequestError, match="no live request has the id 'nobody'"):
        engine.cancel("nobody")
    name = engine.add_request([1], max_new_tokens=1)
    engine.step()
    with pytest.raises(RequestError, match="ended already, or never was"):
        engine.cancel(name)
    name = engine.add_request([1], max_new_tokens=1)
    engine.cancel(name)
    with pytest.raises(RequestError, match="ended already, or never was"):
        engine.cancel(name)


def test_a_closed_engine_says_so():
    with make_engine() as engine:
        stream = engine.stream([1, 2], max_new_tokens=9)
        next(stream)
        engine.add_request([1], max_new_tokens=9, request_id="queued")
    assert list(stream) == []
    assert stream.output.finish_reason == "cancelled"
    assert len(stream.output.token_ids) == 1
    for call in (
        lambda: engine.generate([[1]]),
        lambda: engine.stream([1]),
        lambda: engine.add_request([1]),
        lambda: engine.step(),
        lambda: engine.cancel("queued"),
        lambda: engine.score([[1]]),
    ):
        with pytest.raises(EngineClosedError, match="the engine is closed: make a new one"):
            call()
    assert isinstance(EngineClosedError(), RequestError)
    engine.close()
    assert not engine._loop.runner.pools


class PausingModel(ToyModel):
    """Waits in each step until it is told to go on."""

    def __init__(self):
        super().__init__()
        self.entered, self.go_on = threading.Event(), threading.Event()

    def forward(self, inputs):
        self.entered.set()
        assert self.go_on.wait(10)
        return super().forward(inputs)


def test_two_threads_in_step_and_what_others_may_do_meanwhile():
    model = PausingModel()
    engine = make_engine(model)
    kept = engine.add_request([1, 2], max_new_tokens=2)
    dropped = engine.add_request([3, 4], max_new_tokens=2)
    seen = []
    thread = threading.Thread(target=lambda: seen.extend(engine.step()))
    thread.start()
    assert model.entered.wait(10)
    with pytest.raises(EngineBusyError, match="another thread is in a step"):
        engine.step()
    with pytest.raises(EngineBusyError, match="another thread is in a step"):
        engine.generate([[5]])
    late = engine.add_request([5, 6], max_new_tokens=2)
    engine.cancel(dropped)
    model.go_on.set()
    thread.join()
    while engine.has_unfinished:
        seen += engine.step()
    outputs = {token.request_id: token.output for token in seen if token.output}
    assert {name: o.finish_reason for name, o in outputs.items()} == {
        kept: "length",
        dropped: "cancelled",
        late: "length",
    }
    assert outputs[kept].token_ids == model.continue_greedily([1, 2], 2)
    assert outputs[late].token_ids == model.continue_greedily([5, 6], 2)
    assert_idle(engine)


@pytest.mark.parametrize("phase", ["waiting", "prefilling", "decoding", "preempted"])
def test_cancelling_in_every_phase_gives_everything_back(phase):
    engine = make_engine(max_requests=2)
    bystander = engine.add_request([7] * 5, max_new_tokens=30)
    if phase == "waiting":
        engine.add_request([8], max_new_tokens=30)
    name = engine.add_request([9] * 90, max_new_tokens=30)
    scheduler = engine._loop.scheduler
    made = 0
    for _ in range({"waiting": 2, "prefilling": 2, "decoding": 6, "preempted": 6}[phase]):
        made += sum(token.request_id == name for token in engine.step())
    if phase == "preempted":
        scheduler._preempt(scheduler.running[-1])
    engine.cancel(name)
    assert all(request.request_id != name for request in scheduler.running)
    assert name not in [request.request_id for request in scheduler.waiting.values()]
    rest = []
    while engine.has_unfinished:
        rest += engine.step()
    (last,) = [token for token in rest if token.request_id == name]
    assert last.token_id is None
    assert last.finish_reason == last.output.finish_reason == "cancelled"
    assert last.output.token_ids == engine.model.continue_greedily([9] * 90, made)
    assert (made > 0) == (phase in ("decoding", "preempted"))
    (other,) = [t.output for t in rest if t.request_id == bystander and t.output]
    assert other.token_ids == engine.model.continue_greedily([7] * 5, 30)
    assert_idle(engine)


def test_a_step_that_fails_ends_its_own_requests_only():
    engine = make_engine(max_requests=2)
    names = [engine.add_request([i] * 20, max_new_tokens=5) for i in range(4)]
    seen = engine.step()
    engine.model.fails_in = 1
    with pytest.raises(ArithmeticError, match="the toy broke"):
        engine.step()
    while engine.has_unfinished:
        seen += engine.step()
    outputs = {token.request_id: token.output for token in seen if token.output}
    assert [outputs[name].finish_reason for name in names] == ["error"] * 2 + ["length"] * 2
    assert outputs[names[0]].error == "ArithmeticError: the toy broke"
    for i in (2, 3):
        assert outputs[names[i]].token_ids == engine.model.continue_greedily([i] * 20, 5)
    assert_idle(engine)


@pytest.mark.parametrize("call", ["generate", "score", "stream"])
def test_a_call_whose_step_fails_leaves_nothing_behind(call):
    engine = make_engine(max_requests=2)
    prompts = make_prompts(5)
    calls = {
        "generate": lambda: engine.generate(prompts, max_new_tokens=5),
        "score": lambda: engine.score(prompts, schedule=3),
        "stream": lambda: list(engine.stream(prompts[0], max_new_tokens=5)),
    }
    engine.model.fails_in = 2
    with pytest.raises(ArithmeticError, match="the toy broke"):
        calls[call]()
    assert_idle(engine)
    (output,) = engine.generate(prompts[:1], max_new_tokens=5)
    assert output.token_ids == engine.model.continue_greedily(prompts[0], 5)


def test_logits_that_are_not_finite_end_their_own_request_only():
    engine = make_engine()
    prompts = [[1, 2, 3], [60, 61, 62], [4, 5, 6]]
    plain = engine.model._rows

    def rows(tokens, positions, extents):
        return plain(tokens, positions, extents).masked_fill(tokens == 61, float("nan"))

    engine.model._rows = rows
    outputs = engine.generate(prompts, max_new_tokens=4)
    assert [o.finish_reason for o in outputs] == ["length", "error", "length"]
    assert outputs[1].error == "the logits after its token 2 are not finite"
    # Its page and slot were left full of NaN: whoever gets them next must not see that.
    outputs = engine.generate([[1, 2, 3]] * 8, max_new_tokens=4)
    assert {tuple(o.token_ids) for o in outputs} == {
        tuple(engine.model.continue_greedily([1, 2, 3], 4))
    }
    assert_idle(engine)


class Fails:
    """A byte tokenizer that cannot decode whatever ends with one token, or has it anywhere."""

    def __init__(self, token, *, only_last=False):
        self._plain = byte_tokenizer()
        self._token, self._only_last = token, only_last

    def __getattr__(self, name):
        return getattr(self._plain, name)

    def decode(self, token_ids, **options):
        if self._token in (token_ids[-1:] if self._only_last else token_ids):
            raise KeyError(self._token)
        return self._plain.decode(token_ids, **options)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("only_last", [False, True])
@pytest.mark.parametrize("call", ["generate", "stop", "stream", "requests"])
def test_a_tokenizer_that_raises_ends_its_own_request_only(call, only_last, overlaps):
    model = ToyModel(vocab_size=256)
    prompts = [[1, 2, 3], [60, 61, 62], [4, 5, 6]]
    made = [model.continue_greedily(prompt, 6) for prompt in prompts]
    at = 5 if call == "generate" and only_last else 3
    (bad,) = {made[1][at]} - {*made[0], *made[2], *made[1][:at]}
    engine = make_engine(model, tokenizer=Fails(bad, only_last=only_last), overlaps=overlaps)
    fields = {"max_new_tokens": 6, **({"stop_strings": ["never"]} if call == "stop" else {})}
    outputs = {}
    if call in ("generate", "stop"):
        outputs = dict(enumerate(engine.generate(prompts, **fields)))
    elif call == "stream":
        for i, prompt in enumerate(prompts):
            *_, last = engine.stream(prompt, **fields)
            outputs[i] = last.output
    else:
        names = [engine.add_request(prompt, **fields) for prompt in prompts]
        while engine.has_unfinished:
            for token in engine.step():
                if token.output is not None:
                    outputs[names.index(token.request_id)] = token.output
    assert [outputs[i].finish_reason for i in range(3)] == ["length", "error", "length"]
    assert outputs[1].error == f"the tokenizer raised KeyError: {bad}"
    assert outputs[1].text is None
    count = 6 if call == "generate" else at + 1
    assert outputs[1].token_ids == made[1][:count]
    for i in (0, 2):
        assert outputs[i].token_ids == made[i]
        assert outputs[i].text == engine.tokenizer.decode(made[i])
    assert_idle(engine)
