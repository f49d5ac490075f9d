"""Families as packed rows through the backend, as the README's table says of all of them."""

from __future__ import annotations

import pytest

from regraft.rewriter.backend_report import GraphReport
from tests.backend.batches import LOGITS
from tests.backend.zoo import BEGIN, BROKEN, END, README, SERVED, Way, measure, table, told

LEAKS = (
    "mpt",
    "opt",
    "falcon",
    "afmoe",
    "llama4",
    "bamba",
    "zamba2",
    "qwen3_5",
)
"""Families whose own forward mixes the texts of a packed row, beside those of test_forms.py."""

SAMPLE = ("granitemoe_swa", "rwkv")
"""One whose own forward does not, and one with modules kept whole."""


def written() -> dict[str, list[str]]:
    """The README's table: the cells of each family."""
    text = README.read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text[text.index(BEGIN) : text.index(END)].splitlines()
        if line.startswith("| ")
    ]
    return {name: cells for name, *cells in rows[1:]}


def test_the_table_has_every_family() -> None:
    assert [*written()] == SERVED
    assert all(cells[0] for cells in written().values())


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LEAKS, *SAMPLE])
def test_packed(name: str) -> None:
    """Each text as by itself; where the backend leaves the model alone, as the model has it. All families would take
    an hour: `zoo.py` measures them.
    """
    (way,) = measure(name, "packed")
    assert way.is_right, way
    assert way.in_words == in_words(written()[name][0])
    if name in LEAKS:
        assert way.own > 100 * LOGITS


def in_words(cell: str) -> str:
    """A cell without its number."""
    return cell if cell in ("left alone", "refused") else cell.partition(" ")[2]


def way(**changed: object) -> Way:
    plain = {"family": "f", "form": "packed", "error": 2e-6, "own": 3.0, "from_own": 3.0}
    return Way(**plain | {"state": "grafted", "reason": ""} | changed)  # type: ignore[arg-type]


def test_what_is_right() -> None:
    assert way().is_right
    assert not way(error=3.0, from_own=0.0).is_right  # leaks as the model does
    assert way(state="left alone", error=3.0, from_own=0.0).is_right
    assert way(state="refused").is_right
    assert way(state="in part", error=2e-6, from_own=3.0).is_right
    assert not way(
        state="in part", error=1.0, from_own=1.0
    ).is_right  # neither the one nor the other
    assert way(form="padded left", error=3.0, from_own=1e-6).is_right
    assert not way(form="padded left", own=1e-6, error=3.0).is_right


def test_cells() -> None:
    assert str(way()) == "2e-06"
    assert str(way(state="replayed")) == "2e-06 replayed"
    assert str(way(state="left alone")) == "left alone"
    assert str(way(state="refused")) == "refused"
    assert str(way(form="padded left", from_own=3e-6)) == "3e-06 (of the padded call)"
    ways = {("llama", "packed"): way(family="llama", state="replayed", reason="no mask (aten.mul)")}
    assert table(ways).splitlines()[2:] == [
        "| llama | 2e-06 replayed | 3e+00 |  |  |  |",
        "",
        "* replayed: no mask (llama)",
    ]


def test_what_reports_come_to() -> None:
    served, left = GraphReport(served=True), GraphReport(served=False, reason="it is Tuesday")
    nameless = GraphReport(served=False, reason="no input is called input_ids")
    assert told([served]) == ("grafted", "")
    assert told([left]) == ("left alone", "it is Tuesday")
    assert told([served, nameless]) == ("in part", BROKEN)
    ended = GraphReport(served=True, ends="item() (a.py:3: x.item())")
    assert told([ended, nameless]) == ("in part", f"{BROKEN}: item() (a.py:3: x.item())")
    assert told([GraphReport(served=True, fallbacks=1, last_fallback="a gap")])[0] == "left alone"
