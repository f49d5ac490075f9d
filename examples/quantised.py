"""Quantised weights as transformers loads them: each kind whose library is installed, on a tiny model, on the CPU.

    pip install torchao bitsandbytes optimum-quanto compressed-tensors        # any of them
    python examples/quantised.py                    # a table: what loads, what is served, how far from the model
    python examples/quantised.py --dtype bfloat16

The difference is the largest one of any logit, between tokens decoded by an engine and the quantised model's own
forward without a cache; beside it is that of the model's own decoding with its own cache.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import tempfile
import warnings

import torch
import transformers
from _quantised_kinds import ROW_WISE, WAYS, Way
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import regraft

LOADING = (RuntimeError, ValueError, ImportError, NotImplementedError, AssertionError)
"""What libraries raise for a device, a shape or a version that they are not made for."""


def main() -> None:
    """Try each kind and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32")
    dtype = getattr(torch, parser.parse_args().dtype)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    print(f"{'kind':31} {'version':12} {'served':23} {'difference':>10} {'own cache':>10}")
    with tempfile.TemporaryDirectory() as folder:
        tiny(dtype).save_pretrained(folder)
        for kind, (package, way) in WAYS.items():
            names = ROW_WISE.get(kind, ())
            print(f"{kind:31} {row(folder, package, way, dtype, names)}", flush=True)


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


def row(folder: str, package: str, way: Way, dtype: torch.dtype, row_wise: tuple[str, ...]) -> str:
    """One row of the table."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
    text = torch.randint(320, (24,), generator=torch.Generator().manual_seed(1))
    try:
        model = way(folder, dtype).eval()
        own_logits(model, text)  # compressed-tensors puts its weights together in the first pass
        expected = own_logits(model, text)
    except LOADING as error:
        return f"{version:12} does not run here: {str(error).splitlines()[0]}"
    try:
        engine = regraft.wrap(model, row_wise=row_wise)
    except (regraft.RewriteError, regraft.ValidationError) as error:
        return f"{version:12} refused: {str(error).splitlines()[0]}"
    served = [layer.served for layer in engine.report.layers]
    how = f"{served.count('grafted')} grafted, {served.count('replayed')} replayed"
    (scored,) = engine.score([text.tolist()], schedule="decode")
    difference, own = (
        float((x - expected).abs().max()) for x in (scored, own_decoded(model, text))
    )
    return f"{version:12} {how:23} {difference:10.1e} {own:10.1e}"


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
