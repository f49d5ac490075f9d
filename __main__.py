"""The command line: `regraft inspect | diff | check | generate | bench | serve ...`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import regraft


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 2 for what cannot be read or served, with a line that says why."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (OSError, ValueError, regraft.RewriteError) as error:
        print(f"regraft: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="regraft", description=regraft.__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    inspect = commands.add_parser("inspect", help="what would be rewritten, without weights")
    inspect.add_argument("model", help="a hub id, a folder, or a config.json")
    inspect.add_argument("--json", action="store_true", help="print the report as JSON")
    inspect.add_argument("--html", metavar="FILE", help="write the report as one page")
    inspect.add_argument(
        "--strict", action="store_true", help="exit with 1 if a layer would be replayed"
    )
    inspect.set_defaults(run=_inspect)
    diff = commands.add_parser("diff", help="what differs between two reports; 1 if anything does")
    for name in ("old", "new"):
        diff.add_argument(name, help="a report (of inspect --json), or what inspect takes")
    diff.set_defaults(run=_diff)
    check = commands.add_parser("check", help="is it right, and the same in any batch? 1 if not")
    check.add_argument("model", help="a hub id or a folder")
    check.add_argument(
        "--batch-invariant", action="store_true", help="in the mode that promises the same bits"
    )
    check.add_argument("--dtype", default="auto", help='of the weights (default "auto")')
    check.add_argument("--sizes", type=_count, nargs="+", metavar="N", help="requests in a batch")
    check.set_defaults(run=_check)
    generate = commands.add_parser("generate", help="answer prompts with a model")
    generate.add_argument("model", help="a hub id or a folder")
    generate.add_argument("prompts", nargs="+", metavar="PROMPT")
    generate.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    generate.set_defaults(run=_generate)
    _add_bench(commands)
    _add_serve(commands)
    return parser


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="tokens per second, beside every installed peer")
    bench.add_argument("model", help="a hub id or a folder")
    bench.add_argument("--requests", type=int, default=128, metavar="N")
    bench.add_argument("--prompt", type=int, nargs=2, default=(128, 1024), metavar=("LOW", "HIGH"))
    bench.add_argument("--new", type=int, default=256, help="output tokens per request")
    bench.add_argument("--tokens", type=int, default=8192, help="most tokens of one step")
    bench.add_argument("--repeats", type=int, default=2, metavar="N")
    bench.add_argument(
        "--peers", nargs="*", metavar="PEER", help="of generate, static, batch, vllm (default all)"
    )
    bench.add_argument("--out", default="benchmark", help="where JSON and plot go, without suffix")
    bench.add_argument("--dtype", default="auto", help="of the weights (default auto)")
    bench.add_argument("--device", help="default: a GPU if there is one")
    bench.set_defaults(run=_bench)


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser("serve", help="an HTTP server with OpenAI's routes (extra: serve)")
    serve.add_argument("model", help="a hub id or a folder")
    serve.add_argument("--model-name", metavar="NAME", help="what clients call it (default: MODEL)")
    serve.add_argument("--host", default="127.0.0.1", help="default 127.0.0.1: this machine alone")
    serve.add_argument("--port", type=int, default=8000, help="default 8000")
    serve.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get("REGRAFT_API_KEY"),
        help="what clients have to send (default: the environment's REGRAFT_API_KEY)",
    )
    serve.add_argument("--dtype", default="auto", help="of the weights (default auto)")
    serve.add_argument("--device", help="default: a GPU if there is one")
    serve.add_argument(
        "--prefix-cache", action="store_true", help="reuse what prompts that begin alike share"
    )
    counts = {
        "cache-tokens": "rows that the cache holds",
        "max-requests": "requests running at once",
        "max-batch-tokens": "tokens of one step",
        "max-waiting": "requests that may wait; one more is answered with 429",
        "max-body-bytes": "largest body of a call",
    }
    for name, about in counts.items():
        serve.add_argument(f"--{name}", type=int, metavar="N", help=about)
    serve.set_defaults(run=_serve)


def _load(options: argparse.Namespace) -> Any:
    """The model with its weights, as the options say: `dtype` ("auto" without one), `device` (the CPU without one)."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = getattr(options, "dtype", "auto")
    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"--dtype {dtype} is none of torch's: auto, float32, bfloat16, float16")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
    if not hasattr(options, "device"):
        return model
    return model.to(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _inspect(options: argparse.Namespace) -> int:
    report = regraft.inspect(options.model)
    print(json.dumps(report.to_dict(), indent=2) if options.json else report)
    if options.html:
        report.to_html(options.html)
    replayed = any(layer.served == "replayed" for layer in report.layers)
    return 1 if options.strict and replayed else 0


def _diff(options: argparse.Namespace) -> int:
    from regraft.rewriter.report_diff import diff

    lines = diff(_report_of(options.old), _report_of(options.new))
    print("\n".join(lines) or "served alike")
    return 1 if lines else 0


def _report_of(source: str) -> dict[str, Any]:
    """A report read from its file, or made of a model."""
    path = Path(source)
    if path.suffix == ".json" and path.is_file():
        data: dict[str, Any] = json.loads(path.read_text())
        if "schema_version" in data:
            return data
    return regraft.inspect(source).to_dict()


def _check(options: argparse.Namespace) -> int:
    from regraft.rewriter.check import SIZES, check

    model = _load(options)
    sizes = options.sizes or SIZES
    settings = {"batch_invariant": options.batch_invariant, "max_requests": max(sizes) + 1}
    with regraft.wrap(model, validate="off", **settings) as engine:
        report = check(engine, model, sizes=sizes, progress=True)
    print(report)
    return 0 if report.passed else 1


def _generate(options: argparse.Namespace) -> int:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    with regraft.wrap(_load(options), tokenizer=tokenizer) as engine:
        for output in engine.generate(options.prompts, max_new_tokens=options.max_new_tokens):
            print(output.text)
    return 0


def _bench(options: argparse.Namespace) -> int:
    from regraft.runtime.bench import PEERS, Load, bench

    peers = tuple(PEERS) if options.peers is None else options.peers
    unknown = [peer for peer in peers if peer not in PEERS]
    if unknown:
        print(f"no peers {', '.join(unknown)}: there are {', '.join(PEERS)}", file=sys.stderr)
        return 2
    sizes = (options.requests, tuple(options.prompt), options.new, options.tokens, options.repeats)
    bench(_load(options), regraft.wrap, Load(*sizes), peers, name=options.model, out=options.out)
    return 0


def _serve(options: argparse.Namespace) -> int:
    missing = [
        name
        for name in ("fastapi", "uvicorn", "prometheus_client")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        print(f"serve needs {', '.join(missing)}: pip install 'regraft[serve]'", file=sys.stderr)
        return 2
    from transformers import AutoTokenizer

    from regraft.runtime.serve.server import serve
    from regraft.runtime.serve.settings import ServeSettings

    limits = {name: getattr(options, name) for name in ("max_waiting", "max_body_bytes")}
    # Both before the model is loaded, which takes a while: what is wrong in them is told at once.
    settings = ServeSettings(
        options.model_name or options.model,
        host=options.host,
        port=options.port,
        api_key=options.api_key,
        **{name: value for name, value in limits.items() if value is not None},
    )
    names = ("cache_tokens", "max_requests", "max_batch_tokens")
    sizes = {name: getattr(options, name) for name in names}
    config = regraft.EngineConfig(
        prefix_cache=options.prefix_cache,
        **{name: value for name, value in sizes.items() if value is not None},
    )
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    with regraft.wrap(_load(options), tokenizer=tokenizer, config=config) as engine:
        serve(engine, settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
