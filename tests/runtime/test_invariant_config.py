"""What EngineConfig says of batch invariance, and how tokens are then chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regraft.runtime import sampler
from regraft.runtime.config import EngineConfig
from regraft.runtime.request import Request
from regraft.runtime.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"batch_invariant": 1}, "batch_invariant=1 is neither True nor False"),
        ({"allow_variant": ("replay",)}, "says nothing without batch_invariant=True"),
        ({"batch_invariant": True, "allow_variant": "replay"}, "is no tuple of names"),
        ({"batch_invariant": True, "allow_variant": (1,)}, "is no tuple of names"),
    ],
)
def test_wrong_settings(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        EngineConfig(**fields)


def test_right_settings() -> None:
    config = EngineConfig(batch_invariant=True, compile=False, allow_variant=("replay", "model.a"))
    assert config.batch_invariant and not config.compiles_on(torch.device("cpu"))


@pytest.mark.parametrize("field", ["compile", "cuda_graphs"])
def test_compiled_on_cuda_alone(field: str) -> None:
    """The CPU's vectors and the rest of a row are compiled to different code, a GPU's threads are not."""
    config = EngineConfig(batch_invariant=True, **{field: True})
    assert config.compiles_on(torch.device("cuda"))
    with pytest.raises(ValueError, match="compilers fuse operations"):
        config.compiles_on(torch.device("cpu"))


def test_rows_are_chosen_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """So no sum over the vocabulary can depend on how many rows there are."""
    seen: list[int] = []
    plain = sampler.choose

    def counted(
        logits: torch.Tensor, *given: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(len(logits))
        return plain(logits, *given, **options)

    monkeypatch.setattr(sampler, "choose", counted)
    logits = torch.randn(3, 50)
    params = SamplingParams(max_new_tokens=1, logprobs=True)
    requests = [Request(str(i), i, [1], params) for i in range(3)]
    tokens, logprobs = sampler.choose_each(logits, requests)
    assert seen == [1, 1, 1]
    assert tokens.tolist() == logits.argmax(-1).tolist()
    assert torch.equal(logprobs, logits.log_softmax(-1).amax(-1))
