"""The server against its own OpenAPI schema: whatever is sent, the answer is one that the schema tells."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from tests.runtime.engines import assert_idle
from tests.runtime.servers import running, toy_engine

CHECKS = [
    not_a_server_error,
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
]
BOUNDED = settings(
    max_examples=25,
    derandomize=True,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def schema():
    engine = toy_engine()
    with running(engine) as (_, address):
        yield schemathesis.openapi.from_url(f"{address}/openapi.json")
    assert_idle(engine)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/{name}"),
        ("GET", "/health"),
        ("GET", "/metrics"),
    ],
)
def test_answers_are_those_of_the_schema(schema, method, path, mode):
    operation = schema[path][method]
    if mode is GenerationMode.NEGATIVE and method == "GET":
        return  # there is nothing in it that could be wrong

    @BOUNDED
    @given(operation.as_strategy(generation_mode=mode))
    def check(case):
        if isinstance(case.body, dict) and mode is GenerationMode.POSITIVE:
            # So that some are served: the schema does not know the model's name or its vocabulary.
            case.body |= {"model": "toy", "max_tokens": 2}
            case.body.pop("logit_bias", None)
        statuses.append(case.call_and_validate(checks=CHECKS).status_code)

    statuses: list[int] = []
    check()
    if "{" in path:
        return  # no name but one is right
    assert (200 in statuses) == (mode is GenerationMode.POSITIVE)


def test_every_path_is_tested(schema):
    assert {operation.ok().path for operation in schema.get_all_operations()} == {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/v1/models/{name}",
        "/health",
        "/metrics",
    }
