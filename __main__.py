"""The command line: `regraft inspect | diff | generate ...`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import regraft


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = _parser().parse_args(arguments)
    return options.run(options)


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
    generate = commands.add_parser("generate", help="answer prompts with a model")
    generate.add_argument("model", help="a hub id or a folder")
    generate.add_argument("prompts", nargs="+", metavar="PROMPT")
    generate.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    generate.set_defaults(run=_generate)
    return parser


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


def _generate(options: argparse.Namespace) -> int:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto").eval()
    with regraft.wrap(model, tokenizer=tokenizer) as engine:
        for output in engine.generate(options.prompts, max_new_tokens=options.max_new_tokens):
            print(output.text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
