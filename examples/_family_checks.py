"""A tiny family on a device, against its own no-cache forward."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import torch

import regraft

SCHEDULES: dict[str, Any] = {"prefill": "prefill", "chunk 7": 7, "decode": "decode"}
LENGTHS = (37, 5, 1, 24)
TINY = {
    "page_size": 16, "cache_tokens": 1024, "max_requests": 8, "max_batch_tokens": 128, "validate": "off",
}  # fmt: skip


def check_family(job: tuple[str, str, dict[str, Any]]) -> dict[str, Any]:
    """Largest difference to the no-cache forward by schedule, and the mean KL of bfloat16 beside the plain model's."""
    name, device, config = job
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.families.models import FAMILIES, build

    outcome: dict[str, Any] = {"name": name}
    try:
        family = FAMILIES[name]
        texts = [family.prompt(min(n, family.max_length), seed=n).tolist() for n in LENGTHS]
        expected = _check_float32(build(name).to(device), texts, config, outcome)
        if not family.float32_only:
            _check_bfloat16(
                build(name, torch.bfloat16).to(device), texts, config, expected, outcome
            )
    except Exception as error:  # noqa: BLE001 (a worker reports what went wrong with its family)
        lines = traceback.format_exc().splitlines()
        outcome["problem"] = (
            f"{type(error).__name__}: {str(error)[:300]} | " + " | ".join(lines[-6:-1])[:600]
        )
    return outcome


def _check_float32(
    model: Any, texts: list[list[int]], config: dict[str, Any], outcome: dict[str, Any]
) -> list[torch.Tensor]:
    from regraft.rewriter.validate import reference_logits

    expected = reference_logits(model, texts)
    with regraft.wrap(model, **TINY, **config) as engine:
        outcome["float32"] = {
            label: max(
                float((a - e).abs().max().nan_to_num(1e9))
                for a, e in zip(found, expected, strict=True)
            )
            for label, schedule in SCHEDULES.items()
            for found in [engine.score(texts, schedule=schedule)]
        }
        outcome["notes"] = list(engine.report.notes)
        program = engine._loop.runner._compiled
        if program is not None:
            outcome["compiled"] = (program.num_compiled, program.program.num_bodies)
            outcome["float32"]["generated"] = _check_generated(model, texts, engine)
    return expected


def _check_bfloat16(
    model: Any,
    texts: list[list[int]],
    config: dict[str, Any],
    expected: list[torch.Tensor],
    outcome: dict[str, Any],
) -> None:
    from regraft.rewriter.validate import reference_logits

    plain = reference_logits(model, texts)
    outcome["plain kl"] = _mean_kl(plain, expected)
    with regraft.wrap(model, **TINY, **config) as engine:
        outcome["kl"] = max(
            _mean_kl(engine.score(texts, schedule=s), expected) for s in SCHEDULES.values()
        )


def _mean_kl(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    p, q = (
        torch.cat([t.double() for t in logits]).log_softmax(-1) for logits in (expected, actual)
    )
    return float((p.exp() * (p - q)).sum(-1).mean())


def _check_generated(model: Any, texts: list[list[int]], engine: Any) -> float:
    """Largest difference of the log-probabilities of greedy tokens: crowds come three times, as a step with prompts is
    recorded when its like is met again.
    """
    from regraft.rewriter.validate import reference_logits

    worst = 0.0
    for crowd in (texts, texts[:1], texts) * 3:
        outputs = engine.generate(crowd, max_new_tokens=4, do_sample=False)
        whole = [[*text, *output.token_ids] for text, output in zip(crowd, outputs)]
        for text, output, logits in zip(crowd, outputs, reference_logits(model, whole)):
            after = logits[len(text) - 1 : -1].float().log_softmax(-1)
            tokens = torch.tensor(output.token_ids, device=after.device)
            found = torch.tensor(output.logprobs, device=after.device)
            worst = max(worst, float((after.gather(-1, tokens[:, None])[:, 0] - found).abs().max()))
    return worst
