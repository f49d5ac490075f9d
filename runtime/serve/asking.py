"""From the body of a request to what the engine is asked for."""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError

from regraft.runtime.engine import Engine
from regraft.runtime.errors import RequestError

from .penalties import CountPenalty
from .protocol import ChatBody, CompletionBody, ResponseFormat, Sampling
from .settings import ServeSettings

ANY_JSON_OBJECT = {"type": "object"}


def prompts_of(body: CompletionBody) -> list[Any]:
    """The prompts of a completion, one or several: texts or token ids."""
    prompt = body.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def chat_prompt(body: ChatBody, tokenizer: Any) -> list[int]:
    """The token ids that the tokenizer's chat template makes of a chat; RequestError if it refuses it."""
    if tokenizer.chat_template is None:
        raise RequestError("the tokenizer has no chat template: use /v1/completions")
    messages = [message.model_dump(exclude_none=True) for message in body.messages]
    for message in messages:
        if isinstance(message.get("content"), list):
            message["content"] = _text_parts(message["content"])
    tools = None if body.tool_choice == "none" else body.tools
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False
        )
    except (TemplateError, TypeError, KeyError, ValueError) as error:
        raise RequestError(f"the chat template refuses these messages: {error}") from error
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the messages are no Unicode text: {error}") from error
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _text_parts(parts: list[dict[str, Any]]) -> str:
    for part in parts:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"a content part of type {part.get('type')!r}: text alone is served")
    return "".join(part["text"] for part in parts)


def fields_of(
    body: Sampling, engine: Engine, settings: ServeSettings, count: int
) -> dict[str, Any]:
    """Fields for `count` prompts; RequestError where the server's limits are passed."""
    if count * body.n > settings.max_choices:
        raise RequestError(
            f"{count} prompts with n={body.n} make {count * body.n} choices: at most "
            f"{settings.max_choices} are allowed"
        )
    fields: dict[str, Any] = {"num_return_sequences": body.n}
    if body.temperature > 0:
        sampling = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
        fields |= {"do_sample": True, **sampling, "min_p": body.min_p or None}
    else:
        fields["do_sample"] = False
    if body.seed is not None:
        fields["seed"] = body.seed
    if body.cache_salt is not None:
        fields["cache_salt"] = body.cache_salt
    if body.repetition_penalty is not None:
        fields["repetition_penalty"] = body.repetition_penalty
    if body.logit_bias:
        fields["sequence_bias"] = [[[token], bias] for token, bias in _biases(body.logit_bias)]
    if body.stop:
        stops = [body.stop] if isinstance(body.stop, str) else body.stop
        if len(stops) > settings.max_stop_strings:
            raise RequestError(
                f"{len(stops)} stop strings: at most {settings.max_stop_strings} are allowed"
            )
        fields["stop_strings"] = stops
    return fields | _format_fields(body.response_format)


def penalties_of(body: Sampling, prompts: list[list[int]]) -> dict[str, Any]:
    """The processors of each prompt whose tokens these are."""
    if not (body.presence_penalty or body.frequency_penalty):
        return {}
    return {
        "logits_processor": [
            [CountPenalty(len(prompt), body.presence_penalty, body.frequency_penalty)]
            for prompt in prompts
        ]
    }


def logprob_fields(count: int | None, settings: ServeSettings) -> dict[str, Any]:
    """Fields for `count` likeliest tokens at each place; None: no log-probabilities at all."""
    if count is None:
        return {"logprobs": False}
    if count > settings.max_top_logprobs:
        raise RequestError(
            f"{count} likeliest tokens: at most {settings.max_top_logprobs} are allowed"
        )
    return {"logprobs": True, "top_logprobs": count}


def room_for(prompt: list[int], engine: Engine) -> int:
    """How many tokens can follow a prompt."""
    limits = [engine.max_cached]
    if engine.model.max_positions is not None:
        limits.append(engine.model.max_positions)
    return max(1, min(limits) - len(prompt))


def _biases(logit_bias: dict[str, float]) -> list[tuple[int, float]]:
    for token in logit_bias:
        if not (token.isascii() and token.isdigit()):
            raise RequestError(f"logit_bias names {token!r}: give token ids")
    return [(int(token), float(bias)) for token, bias in logit_bias.items()]


def _format_fields(wanted: ResponseFormat | None) -> dict[str, Any]:
    if wanted is None or wanted.type == "text":
        return {}
    if wanted.type == "json_object":
        return {"json_schema": ANY_JSON_OBJECT}
    if wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise RequestError("response_format of type json_schema has no json_schema: give one")
        return {"json_schema": wanted.json_schema.schema_}
    if wanted.regex is None:
        raise RequestError("response_format of type regex has no regex: give one")
    return {"regex": wanted.regex}
