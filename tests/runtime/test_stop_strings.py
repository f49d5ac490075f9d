"""Stop strings: found wherever the tokens cut them, left out of the text, held back while streaming."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import StopStringCriteria

from regraft.runtime.errors import RequestError
from regraft.runtime.text import StopText, decode
from tests.runtime.engines import assert_idle, make_engine
from tests.runtime.tokenizers_made_here import byte_tokenizer, word_tokenizer
from tests.runtime.toy import ToyModel

WORDS = ["ab", "b", "abc", "ca", "c", "bca", "aab", "é"]


def read(tokenizer, tokens, stops):
    """How many tokens are read, the text, and its pieces as a stream gets them."""
    text, pieces = StopText(tokenizer, stops), []
    for token in tokens:
        stopped = text.take(token)
        pieces.append(text.push(token))
        if stopped:
            break
    return len(pieces), text, [*pieces, text.flush()]


@pytest.mark.parametrize("seed", range(40))
def test_found_at_the_token_that_completes_it(seed):
    """Against the whole text decoded anew after each token, and against transformers' criteria."""
    rng = random.Random(seed)
    tokenizer = byte_tokenizer() if seed % 2 else word_tokenizer(WORDS)
    alphabet = tokenizer("abc é")["input_ids"] if seed % 2 else range(len(WORDS))
    tokens = [rng.choice(list(alphabet)) for _ in range(40)]
    stops = ["".join(rng.choices("abc é", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
    count, text, pieces = read(tokenizer, tokens, stops)

    whole = decode(tokenizer, tokens)
    ends = [whole.find(stop) for stop in stops if stop in whole]
    assert text.text == (whole[: min(ends)] if ends else whole)
    assert "".join(pieces) == text.text
    seen = [decode(tokenizer, tokens[:n]) for n in range(1, len(tokens) + 1)]
    assert count == next((n for n, t in enumerate(seen, 1) if any(s in t for s in stops)), 40)
    if seed % 2:  # of words, transformers strips the first one's space
        theirs = StopStringCriteria(tokenizer, stops)
        done = [bool(theirs(torch.tensor([tokens[:n]]), None)) for n in range(1, 41)]
        assert count == (done.index(True) + 1 if any(done) else 40)


def test_nothing_is_streamed_that_may_belong_to_a_stop_string():
    tokenizer = byte_tokenizer()
    _, text, pieces = read(tokenizer, tokenizer("one STO two ST")["input_ids"], ["STOP", "TWO"])
    assert text.text == "one STO two ST"
    assert pieces[4:9] == ["", "", "", "STO ", "t"]  # a "T" would be held back
    assert pieces[-1] == "ST"


def test_a_special_token_may_stop_and_is_no_text():
    tokenizer = byte_tokenizer()
    tokens = [*tokenizer("abc")["input_ids"], tokenizer.eos_token_id, 70, 71]
    count, text, _ = read(tokenizer, tokens, ["<eos>"])
    assert (count, text.text) == (4, "abc")
    count, text, _ = read(tokenizer, tokens, ["never"])
    assert (count, text.text) == (6, decode(tokenizer, tokens))


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_request_ends_with_it(overlaps):
    tokenizer = byte_tokenizer()
    engine = make_engine(ToyModel(vocab_size=256), tokenizer=tokenizer, overlaps=overlaps)
    (free,) = engine.generate([[1, 2, 3]], max_new_tokens=30)
    stop = free.text[9:12]
    at = free.text.find(stop)
    (cut,) = engine.generate([[1, 2, 3]], max_new_tokens=30, stop_strings=stop)
    assert cut.finish_reason == "stop"
    assert cut.text == free.text[:at]
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)]
    assert len(cut.logprobs) == len(cut.token_ids)
    stream = engine.stream([1, 2, 3], max_new_tokens=30, stop_strings=[stop, "never"])
    assert "".join(token.text for token in stream) == cut.text
    one, other = engine.generate(
        [[1, 2, 3]] * 2, max_new_tokens=30, stop_strings=[["never"], [stop]]
    )
    assert (one.text, other.text) == (free.text, cut.text)
    assert_idle(engine)


def test_without_a_tokenizer_it_is_refused():
    with pytest.raises(
        RequestError, match=r"stop_strings=\['x'\] are texts, and the engine has no"
    ):
        make_engine().generate([[1]], stop_strings="x")


def test_max_time_ends_a_request_after_its_next_token():
    engine = make_engine()
    (short,) = engine.generate([[1, 2]], max_new_tokens=40, max_time=1e-9)
    assert (len(short.token_ids), short.finish_reason) == (1, "length")
    (whole,) = engine.generate([[1, 2]], max_new_tokens=40, max_time=1e9)
    assert len(whole.token_ids) == 40
