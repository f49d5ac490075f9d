"""64 ragged texts scored on the CPU: packed through `torch.compile(backend="regraft")` beside padded ways, in one run.

    python examples/score_packed.py                 # layers of SmolLM2-135M's shape, random weights, float32
    python examples/score_packed.py --layers 30     # as many as SmolLM2-135M has

Texts of 16 to 512 tokens; every way returns the log-likelihood of each. Each is compiled by a few texts; then the ways
take turns, and the least of three passes over all texts counts, in seconds and in CPU seconds: on a machine in use by
others only the latter say much. Sorted by length into small batches, a padded way has less padding and needs the texts
beforehand.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable

import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig

Score = Callable[[list[Tensor]], Tensor]

WARM_UP, BATCH = 5, 8
"""Texts that a way is compiled by, and texts in a batch of texts of about one length."""


def main() -> None:
    """Measure, compare the scores, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shapes(arguments.layers, arguments.vocabulary)).eval()
    lengths = torch.randint(16, arguments.longest + 1, (arguments.texts,)).tolist()
    texts = [torch.randint(model.config.vocab_size, (length,)) for length in lengths]
    ways = {
        "Regraft, packed": packed(torch.compile(model, backend="regraft")),
        "eager, padded": padded(model),
        "Inductor, padded": padded(torch.compile(model, dynamic=True)),
        "eager, padded, sorted": by_length(padded(model)),
    }
    for score in ways.values():
        score(texts[:WARM_UP])
    best, scores = measure(ways, texts, arguments.rounds)
    for name, (seconds, cpu) in best.items():
        print(f"{name:22} {seconds:8.2f} s {cpu:8.2f} CPU s {sum(lengths) / cpu:8.0f} tokens/CPU s")
    ours, *others = ways
    for other in others:
        off = float((scores[ours] - scores[other]).abs().max())
        times, cpu_times = (theirs / own for own, theirs in zip(best[ours], best[other]))
        print(
            f"{times:.2f} times (CPU: {cpu_times:.2f}) {other}; scores differ by at most {off:.1e}"
        )
    print(
        f"{arguments.texts} texts, {sum(lengths)} tokens; {os.cpu_count()} cores "
        f"({platform.processor() or platform.machine()}), {torch.get_num_threads()} threads, {model.dtype}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}, load {os.getloadavg()[0]:.1f}"
    )


def measure(
    ways: dict[str, Score], texts: list[Tensor], rounds: int
) -> tuple[dict[str, list[float]], dict[str, Tensor]]:
    """The least seconds and CPU seconds of each way, which take turns, and the scores."""
    best = {name: [float("inf")] * 2 for name in ways}
    scores = {}
    for _ in range(rounds):
        for name, score in ways.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            scores[name] = score(texts)
            spent = time.perf_counter() - start, time.process_time() - cpu_start
            best[name] = [min(pair) for pair in zip(best[name], spent)]
    return best, scores


def shapes(layers: int, vocabulary: int) -> LlamaConfig:
    """SmolLM2-135M's, but for the vocabulary: a padded batch has that many logits at each place."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )


def packed(model: Callable) -> Score:
    """One row; `position_ids` say where a text begins."""

    def score(texts: list[Tensor]) -> Tensor:
        row = torch.cat(texts)[None]
        positions = torch.cat([torch.arange(len(text)) for text in texts])[None]
        with torch.no_grad():
            logits = model(input_ids=row, position_ids=positions, use_cache=False).logits[0]
        parts = logits.split([len(text) for text in texts])
        return torch.stack([likelihood(part, text) for part, text in zip(parts, texts)])

    return score


def padded(model: Callable) -> Score:
    """One row per text, padded on the right."""

    def score(texts: list[Tensor]) -> Tensor:
        ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence(
            [torch.ones_like(t) for t in texts], batch_first=True
        )
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return torch.stack(
            [likelihood(rows[: len(text)], text) for rows, text in zip(logits, texts)]
        )

    return score


def by_length(score: Score) -> Score:
    """The shortest texts first, a few at a time."""

    def score_sorted(texts: list[Tensor]) -> Tensor:
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        groups = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
        found = torch.cat([score([texts[index] for index in group]) for group in groups])
        return found[torch.tensor(order).argsort()]

    return score_sorted


def likelihood(logits: Tensor, text: Tensor) -> Tensor:
    """Mean log-probability of a text's tokens, given those before."""
    return -cross_entropy(logits[:-1].float(), text[1:])


if __name__ == "__main__":
    main()
