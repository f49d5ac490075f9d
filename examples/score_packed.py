"""64 ragged texts scored on the CPU: packed through `torch.compile(backend="regraft")` beside padded ways, in one run.

    python examples/score_packed.py                 # the shapes of SmolLM2-135M, random weights, float32
    python examples/score_packed.py --layers 6      # fewer layers

Texts of 16 to 512 tokens; every way returns the log-likelihood of each. Each is run once to warm up (which compiles
it); then the ways take turns, and the fastest of three passes over all texts counts.
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


def main() -> None:
    """Measure, compare the scores, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--vocabulary", type=int, default=8192)
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
    }
    scores = {name: score(texts) for name, score in ways.items()}
    seconds = dict.fromkeys(ways, float("inf"))
    for _ in range(arguments.rounds):
        for name, score in ways.items():
            start = time.perf_counter()
            score(texts)
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    for name, best in seconds.items():
        print(f"{name:18} {best:8.2f} s  {sum(lengths) / best:8.0f} tokens/s")
    ours, *others = ways
    for other in others:
        off = float((scores[ours] - scores[other]).abs().max())
        print(
            f"{seconds[other] / seconds[ours]:.2f} times {other}; scores differ by at most {off:.1e}"
        )
    print(
        f"{arguments.texts} texts, {sum(lengths)} tokens; {os.cpu_count()} cores "
        f"({platform.processor() or platform.machine()}), {torch.get_num_threads()} threads, {model.dtype}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )


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


def likelihood(logits: Tensor, text: Tensor) -> Tensor:
    """Mean log-probability of a text's tokens, given those before."""
    return -cross_entropy(logits[:-1].float(), text[1:])


if __name__ == "__main__":
    main()
