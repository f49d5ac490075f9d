"""Every family through the backend in every form: measured, and written into the README as a table.

python -m tests.backend.zoo measure FILE [--forms packed "padded right" ...] [FAMILY ...]   # adds what FILE lacks
python -m tests.backend.zoo table FILE                                       # the README's table and its reasons
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from regraft.rewriter.backend_report import GraphReport, backend_reports
from regraft.rewriter.errors import RewriteError
from tests.backend.batches import FORMS, LOGITS, alone, batch, compiled, fresh_dynamo, texts, worst
from tests.families.models import FAMILIES, build

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = (
    "<!-- families through the backend: tests/backend/zoo.py -->",
    "<!-- end of the families -->",
)
SERVED = [name for name, family in FAMILIES.items() if not family.refused]
NO_IDS = "no input is called input_ids"
BROKEN = "Dynamo breaks the graph in the middle of the model"


@dataclass(frozen=True)
class Way:
    """One family in one form.

    error       largest difference of a logit from each text by itself
    own         the same of the model's own call
    from_own    largest difference of a logit from the model's own call
    state       "grafted", "replayed" (in part), "left alone", "in part" (some of its graphs left alone), or "refused":
                the call is an error, as the texts of the row would see each other
    reason      why it is not all grafted
    """

    family: str
    form: str
    error: float
    own: float
    from_own: float
    state: str
    reason: str

    @property
    def is_right(self) -> bool:
        """As each text by itself; where the model's own call counts padding, or is left alone, as that call."""
        return self.state == "refused" or self.difference <= LOGITS

    @property
    def difference(self) -> float:
        """From whichever is right."""
        if self.counts_padding or self.state == "left alone":
            return self.from_own
        return min(self.error, self.from_own) if self.state == "in part" else self.error

    @property
    def counts_padding(self) -> bool:
        """Whether the model itself, which ignores padding, gives positions that count it."""
        return self.form == "padded left" and self.own > 10 * LOGITS

    @property
    def in_words(self) -> str:
        """What its cell says beside the number."""
        words = ["(of the padded call)"] * (self.counts_padding and self.state != "left alone")
        return " ".join(words + [self.state] * (self.state != "grafted"))

    def __str__(self) -> str:
        if self.state in ("left alone", "refused"):
            return self.in_words
        return f"{self.difference:.0e} {self.in_words}".strip()


def measure(name: str, *forms: str) -> list[Way]:
    """One model, compiled without a compiler behind it; both sides of padding go through one graph."""
    model, ways, said = build(name), [], ("", "")
    with fresh_dynamo(), torch.no_grad():
        step = compiled(model)
        for form in forms:
            call, before, fallen = batch(form, texts(name)), len(backend_reports()), fallbacks()
            expected = alone(model, call.texts)
            own = call.split(model(**call.inputs, use_cache=False).logits)
            try:
                logits = call.split(step(**call.inputs, use_cache=False).logits)
            except RewriteError:
                off, (_, reason) = worst(own, expected), told(backend_reports()[before:])
                ways.append(Way(name, form, off, off, 0.0, "refused", reason))
                continue
            new = backend_reports()[before:]
            said = told(new) if new else said
            here = ("left alone", fallbacks()[-1]) if fallbacks() != fallen else said
            errors = worst(logits, expected), worst(own, expected), worst(logits, own)
            ways.append(Way(name, form, *errors, *here))
    return ways


def fallbacks() -> list[str]:
    """The reasons of all calls so far that ran on the batch as it is, as far as reports keep them."""
    return [r.last_fallback for r in backend_reports() for _ in range(r.fallbacks)]


def told(reports: Sequence[GraphReport]) -> tuple[str, str]:
    """What the reports of one call come to, and why it is no more."""
    left = [report.reason for report in reports if not report.served]
    left += [report.last_fallback for report in reports if report.fallbacks]
    if left:
        state = (
            "left alone" if not any(r.served and not r.fallbacks for r in reports) else "in part"
        )
        said = [reason for reason in left if reason != NO_IDS]
        ends = [f"{BROKEN}: {report.ends}" for report in reports if report.ends]
        broken = (ends or [BROKEN])[0]
        return state, said[0] if said else broken if len(reports) > 1 else NO_IDS
    replayed = [layer.reason for report in reports for layer in report.layers if layer.replay]
    return ("replayed", replayed[0]) if replayed else ("grafted", "")


def table(ways: dict[tuple[str, str], Way]) -> str:
    """Markdown: a row a family, and the reasons of what is not all grafted."""
    head = [
        "family",
        "packed",
        "own packed row is off by",
        *(f for f in FORMS[::-1] if f != "packed"),
    ]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    reasons: dict[str, list[str]] = {}
    for name in SERVED:
        if (name, "packed") not in ways:
            continue
        cells = {form: ways[name, form] for form in FORMS if (name, form) in ways}
        packed = cells["packed"]
        off = "nothing" if packed.own <= LOGITS else f"{packed.own:.0e}"
        others = [str(cells.get(form, "")) for form in head[3:]]
        lines.append(f"| {' | '.join([name, str(packed), off, *others])} |")
        for way in cells.values():
            if way.reason:
                names = reasons.setdefault(f"{way.state}: {shortened(way.reason)}", [])
                names += [name] * (name not in names)
    told = [f"* {reason} ({', '.join(names)})" for reason, names in reasons.items()]
    return "\n".join([*lines, "", *told])


def shortened(reason: str) -> str:
    """A reason without the place where it arose."""
    reason = re.sub(r" \((?:<|aten|call_|get_attr|regraft|placeholder|_dynamo).*", "", reason)
    return re.sub(r"fixed to \d+", "fixed", reason).replace("transformers/models/", "").strip()


def load(path: Path) -> dict[tuple[str, str], Way]:
    lines = path.read_text().splitlines() if path.exists() else []
    ways = [Way(**json.loads(line)) for line in lines]
    return {(way.family, way.form): way for way in ways}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["measure", "table"])
    parser.add_argument("file", type=Path)
    parser.add_argument("families", nargs="*", default=SERVED)
    parser.add_argument("--forms", nargs="*", default=FORMS, choices=FORMS)
    args = parser.parse_args()
    known = load(args.file)
    if args.what == "table":
        text = README.read_text()
        before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
        README.write_text(f"{before}\n\n{table(known)}\n\n{after}")
        return
    for name in args.families:
        forms = [form for form in args.forms if (name, form) not in known]
        with args.file.open("a") as file:
            file.writelines(json.dumps(asdict(way)) + "\n" for way in measure(name, *forms))


if __name__ == "__main__":
    main()
