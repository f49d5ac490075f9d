"""Quantised weights as transformers loads them: each kind whose library is installed, on a tiny model.

    pip install torchao bitsandbytes optimum-quanto compressed-tensors        # any of them
    python examples/quantised.py                    # a table: what loads, what is served, how far from the model
    python examples/quantised.py --dtype bfloat16 --kinds torchao,"quanto int8"
    python examples/quantised.py --device cuda --workers 6        # compiled, from CUDA graphs, in bfloat16

The difference is the largest one of any logit, between tokens decoded by an engine and the quantised model's own
forward without a cache; beside it is that of the model's own decoding with its own cache, and what `wrap` took.
With --workers each kind has a process of its own, so that one that crashes or hangs takes no other along.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import re
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch
import transformers
from _quantised_kinds import ROW_WISE, WAYS, Way
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import regraft

LOADING = (
    RuntimeError, ValueError, ImportError, NotImplementedError, AssertionError, AttributeError, TypeError, OSError,
)  # fmt: skip
"""What libraries raise for a device, a shape or a version that they are not made for."""

REFUSED = (regraft.RewriteError, regraft.ValidationError)


def main() -> None:
    """Try each kind and print the table."""
    options = arguments()
    print(
        f"{'kind':35} {'version':12} {'served':23} {'difference':>10} {'own cache':>10} {'wrap s':>7}",
        flush=True,
    )
    if options.workers:
        by_processes(options)
        return
    reports = quiet()
    dtype, device = getattr(torch, options.dtype), torch.device(options.device)
    with tempfile.TemporaryDirectory() as folder:
        tiny(dtype).save_pretrained(folder)
        for kind in options.kinds:
            package, way = WAYS[kind]
            trial = Trial(kind, package, way, options.believe, reports)
            print(f"{kind:35} {trial.row(folder, dtype, device)}", flush=True)


def arguments() -> argparse.Namespace:
    """Of the command line; `kinds` are whole names, and without a dtype there is the device's usual one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", help="default: float32, on cuda bfloat16")
    parser.add_argument("--kinds", default="", help="names or how they begin, with commas between")
    parser.add_argument("--workers", type=int, default=0, help="processes at once, one per kind")
    parser.add_argument("--seconds", type=float, default=600, help="most for one kind's process")
    parser.add_argument(
        "--believe", action="store_true", help="name in row_wise whatever Regraft measured to keep rows apart"
    )  # fmt: skip
    options = parser.parse_args()
    wanted = [name.strip() for name in options.kinds.split(",")]
    for name in wanted:
        if not any(kind.startswith(name) for kind in WAYS):
            parser.error(f"no kind begins with {name!r}: {', '.join(WAYS)}")
    options.kinds = dict.fromkeys(kind for name in wanted for kind in WAYS if matches(kind, name))
    options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    return options


def matches(kind: str, name: str) -> bool:
    """A whole name is that kind alone, though others begin with it."""
    return kind == name or (name not in WAYS and kind.startswith(name))


def by_processes(options: argparse.Namespace) -> None:
    """The rows as they come, each from a process of its own."""
    same = ["--device", options.device, "--dtype", options.dtype]
    command = [sys.executable, __file__, *same, *(["--believe"] if options.believe else [])]
    with ThreadPoolExecutor(options.workers) as pool:
        rows = [pool.submit(row_of, command, kind, options.seconds) for kind in options.kinds]
        for row in as_completed(rows):
            print(row.result(), flush=True)


def row_of(command: list[str], kind: str, seconds: float) -> str:
    """What a process prints below the table's head, or how it ended."""
    try:
        done = subprocess.run(
            [*command, "--kinds", kind], capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return f"{kind:35} ended after {seconds:.0f} seconds"
    sys.stderr.write(f"--- {kind}\n{done.stderr}")
    _, *row = done.stdout.rstrip().split("\n")
    if done.returncode == 0:
        return "\n".join(row)
    last = done.stderr.rstrip().rsplit("\n", 1)[-1]
    return f"{kind:35} ended with status {done.returncode}: {last}"


class Reports(logging.Handler):
    """Keeps transformers' last message: where weights do not load, the error says no more than to look there."""

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Instead of printing it."""
        self.last = record.getMessage()

    def reason(self, error: BaseException) -> str:
        """In one line."""
        text = str(error).strip()
        inner = re.search(r"^[\w.]+(?:Error|Exception): (.+)", self.last, re.MULTILINE)
        if inner is not None and "CONVERSION" in text:
            text = inner[1]
        return text.split("\n")[0] or type(error).__name__


def quiet() -> Reports:
    """Turns down what libraries say while loading."""
    reports = Reports()
    transformers.logging.set_verbosity_warning()
    transformers.logging.disable_default_handler()
    transformers.logging.disable_propagation()
    transformers.logging.add_handler(reports)
    transformers.logging.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    return reports


def tiny(dtype: torch.dtype) -> PreTrainedModel:
    """Two layers with random weights, in widths that every kind can divide."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model


class Trial:
    """Of one kind. Nothing that a library or Regraft raises leaves it."""

    def __init__(self, kind: str, package: str, way: Way, believe: bool, reports: Reports) -> None:
        self.package, self.way, self.reports = package, way, reports
        self.row_wise, self.believe = ROW_WISE.get(kind, ()), believe
        self.seconds = 0.0

    def row(self, folder: str, dtype: torch.dtype, device: torch.device) -> str:
        """What the table says behind the name."""
        try:
            version = f"{importlib.metadata.version(self.package):12}"
        except importlib.metadata.PackageNotFoundError:
            return "not installed"
        text = torch.randint(320, (24,), generator=torch.Generator().manual_seed(1))
        self.reports.last = ""
        try:
            model, text = self.way(folder, dtype, device).eval(), text.to(device)
            # compressed-tensors puts its weights together in the first pass.
            own_logits(model, text)
            expected = own_logits(model, text)
        except LOADING as error:
            return f"{version} does not run here: {self.reports.reason(error)}"
        try:
            engine = self.wrapped(model)
        except REFUSED as error:
            return f"{version} refused: {self.reports.reason(error)}"
        except LOADING as error:
            return f"{version} fails in wrap: {type(error).__name__}: {self.reports.reason(error)}"
        return f"{version} {self.measured(engine, model, text, expected)}"

    def wrapped(self, model: PreTrainedModel) -> regraft.Engine:
        """By `wrap`, with those of the known operators that the model has: they differ by device."""
        while True:
            start = time.perf_counter()
            try:
                engine = regraft.wrap(model, row_wise=self.row_wise)
            except regraft.RewriteError as error:
                names = self.other_names(str(error))
                if names == self.row_wise:
                    raise
                self.row_wise = names
            else:
                self.seconds = time.perf_counter() - start
                return engine

    def other_names(self, refusal: str) -> tuple[str, ...]:
        """Without one that the model has not; if they are believed, with those that a measurement speaks for."""
        names = [
            name for name in self.row_wise if f"row_wise names {name!r}, and the" not in refusal
        ]
        if self.believe:
            names += re.findall(r"say row_wise=\('([^']+)',\)", refusal)
        return tuple(dict.fromkeys(names))

    def measured(
        self, engine: regraft.Engine, model: PreTrainedModel, text: Tensor, expected: Tensor
    ) -> str:
        """How it is served and how far off, with a line on each part that is not compiled or recorded."""
        served = [layer.served for layer in engine.report.layers]
        how = f"{served.count('grafted')} grafted, {served.count('replayed')} replayed"
        try:
            (scored,) = engine.score([text.tolist()], schedule="decode")
            difference, own = (
                float((x - expected).abs().max()) for x in (scored, own_decoded(model, text))
            )
        except LOADING as error:
            return f"{how:23} fails: {type(error).__name__}: {self.reports.reason(error)}"
        notes = [
            note for note in engine.report.notes
            if re.search("without CUDA graphs|outside CUDA graphs|not compiled", note)
        ]  # fmt: skip
        if self.believe and self.row_wise:
            notes.append(f"row_wise={self.row_wise}")
        engine.close()
        line = f"{how:23} {difference:10.1e} {own:10.1e} {self.seconds:7.1f}"
        return "\n    ".join([line, *notes])


@torch.no_grad()
def own_logits(model: PreTrainedModel, text: Tensor) -> Tensor:
    """By the model's own forward, without a cache."""
    return model(input_ids=text[None], use_cache=False).logits[0].float()


@torch.no_grad()
def own_decoded(model: PreTrainedModel, text: Tensor) -> Tensor:
    """By the model's own forward, token by token, with its own cache."""
    rows, cache = [], None
    for token in text:
        output = model(input_ids=token[None, None], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        rows.append(output.logits[0, 0].float())
    return torch.stack(rows)


if __name__ == "__main__":
    main()
