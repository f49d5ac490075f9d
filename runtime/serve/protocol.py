"""Bodies of requests: OpenAI's fields that are served, a few of others' in use, and no unknown ones."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Token = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
Tokens = Annotated[list[Token], Field(min_length=1)]


class StreamOptions(BaseModel):
    """What a stream tells besides its text."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False


class JsonSchema(BaseModel):
    """A schema and the name that the client gives it."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """What the text has to be: anything, a JSON object, of a JSON schema, or of a regular expression."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text", "json_object", "json_schema", "regex"] = "text"
    json_schema: JsonSchema | None = None
    regex: Text | None = None


class Sampling(BaseModel):
    """Fields that both kinds of completion share."""

    model_config = ConfigDict(extra="forbid")
    model: str
    n: int = Field(default=1, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float = Field(default=1.0, ge=0, le=100, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, le=1)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.001, le=1000, allow_inf_nan=False)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stop: Text | list[Text] | None = None
    response_format: ResponseFormat | None = None
    cache_salt: Text | None = None
    user: str | None = None


class CompletionBody(Sampling):
    """Body of `/v1/completions`."""

    prompt: (
        Text
        | Tokens
        | Annotated[list[Text], Field(min_length=1)]
        | Annotated[list[Tokens], Field(min_length=1)]
    )
    max_tokens: int = Field(default=16, ge=1)
    logprobs: int | None = Field(default=None, ge=0)
    echo: bool = False


class Message(BaseModel):
    """One message of a chat; what a role may carry is the chat template's to say."""

    model_config = ConfigDict(extra="allow")
    role: Text
    content: str | list[dict[str, Any]] | None = None


class ChatBody(Sampling):
    """Body of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] | None = None
