"""One line, then eight chats at once, measured beside transformers' own ways in the same run.

python examples/quickstart.py            # SmolLM2-135M-Instruct, from a PyPI wheel
python examples/quickstart.py MODEL      # any hub id or folder
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from typing import Any

import _smollm2
from _baselines import BASELINES, Run, timed
from _chats import QUICK, encode
from tqdm import tqdm

import regraft


def main() -> None:
    """Load, wrap, report, answer, compare."""
    arguments = parse_arguments()
    print(f"Loading {arguments.model or _smollm2.NAME} ...")
    model, tokenizer = _smollm2.load(arguments.model)

    engine = regraft.wrap(model, tokenizer=tokenizer)
    print(engine.report)

    prompts, limit = encode(tokenizer, QUICK), arguments.max_new_tokens
    print(f"\n{len(prompts)} chats at once, up to {limit} tokens each:\n")
    answer(engine, prompts, limit)
    if not arguments.no_compare:
        compare(engine, model, prompts, limit)


def answer(engine: Any, prompts: list[list[int]], limit: int) -> None:
    """Stream all answers, one line each while they grow and in full when they are complete."""
    board = Board(len(prompts))
    rows = {
        engine.add_request(prompt, do_sample=False, max_new_tokens=limit): row
        for row, prompt in enumerate(prompts)
    }
    begin, num_tokens = time.perf_counter(), 0
    while engine.has_unfinished:
        for token in engine.step():
            board.texts[rows[token.request_id]] += token.text
            num_tokens += 1
        board.draw(f"{num_tokens} tokens, {num_tokens / (time.perf_counter() - begin):.1f} tok/s")
    board.clear()
    for question, text in zip(QUICK, board.texts, strict=True):
        print(f"> {question}\n{text.strip()}\n")


def compare(engine: Any, model: Any, prompts: list[list[int]], limit: int) -> None:
    """Answer the same prompts four ways, greedily, and print the output tokens per second of each."""
    lengths = [limit] * len(prompts)

    def graft() -> list[list[int]]:
        outputs = engine.generate(prompts, do_sample=False, max_new_tokens=limit, progress=True)
        return [list(output.token_ids) for output in outputs]

    runs = [timed("Regraft", graft)]
    for name, method in tqdm(BASELINES.items(), desc="Measuring transformers", unit="way"):
        runs.append(timed(name, lambda method=method: method(model, prompts, lengths)))
    print_runs(runs)


def print_runs(runs: list[Run]) -> None:
    """A table of the runs; `same` counts the requests whose tokens equal those made one by one."""
    (reference,) = [run for run in runs if "one by one" in run.name]
    print(f"\n{'':34}{'seconds':>9}{'tokens':>8}{'tok/s':>8}   same tokens as one by one")
    for run in runs:
        pairs = zip(run.token_ids, reference.token_ids, strict=True)
        same = sum(ours == theirs for ours, theirs in pairs)
        print(
            f"{run.name:34}{run.seconds:9.1f}{run.num_tokens:8}{run.tokens_per_second:8.1f}"
            f"   {same} of {len(run.token_ids)}"
        )


class Board:
    """A few lines at the bottom of a terminal, redrawn in place; draws nothing into a pipe."""

    def __init__(self, num_rows: int) -> None:
        """`num_rows` growing texts, all of them empty."""
        self.texts = [""] * num_rows
        self._drawn = False
        self._live = sys.stdout.isatty()

    def draw(self, status: str) -> None:
        """Show the end of every text, and `status` below."""
        if not self._live:
            return
        self.clear()
        width = shutil.get_terminal_size().columns - 4
        for row, text in enumerate(self.texts, 1):
            print(f"{row}: {' '.join(text.split())[-width:]}")
        print(status, end="", flush=True)
        self._drawn = True

    def clear(self) -> None:
        """Take the lines back."""
        if self._drawn:
            print(f"\r\x1b[{len(self.texts)}A\x1b[J", end="")
            self._drawn = False


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a hub id or a folder; by default SmolLM2-135M")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--no-compare", action="store_true", help="leave transformers' runs out")
    return parser.parse_args()


if __name__ == "__main__":
    main()
