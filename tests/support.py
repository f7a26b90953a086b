"""The support table: run every mode on every family, keep what was found, write it into the docs.

    python tests/support.py        # rewrites support.json and docs/transformers.md

``support.json`` holds what was found, for transformers 4 and 5 apart; run the command with both.
``test_families.py`` runs the same cells and fails where one differs from the file, or the page from
it.
"""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers
from families import FAMILIES, Family
from modes import MODES, Mode

import santa_torch

HERE = Path(__file__).resolve().parent
FOUND = HERE / "support.json"
PAGE = HERE.parent / "docs" / "transformers.md"
BEGIN, END = "<!-- support table: tests/support.py writes it -->", "<!-- end of the table -->"

MAJOR = transformers.__version__.split(".")[0]
WORKS = "works"
ALIEN = "not in transformers: the model fails in the same way without santa_torch"


@torch.no_grad()
def outcome(family: Family, mode: Mode, model: Any = None) -> str:
    """What happens in one cell.

    Returns
    -------
    str
        ``"works"``; ``"refused: ..."`` with the library's message; or ``ALIEN`` and the
        kind of error.

    Raises
    ------
    Exception
        A result is wrong, or an error comes from elsewhere and only while the model is enabled.
    """
    model = family.build() if model is None else model
    try:
        mode(model)
    except AssertionError:
        raise
    except Exception as error:
        if _is_ours(error):
            return f"refused: {_first_line(error)}"
        try:
            mode.run(model)
        except Exception as same:
            return f"{ALIEN} ({type(same).__name__})"
        raise
    return WORKS


def load() -> dict[str, dict[str, dict[str, str]]]:
    """What was found: version, family, mode."""
    found: dict[str, dict[str, dict[str, str]]] = json.loads(FOUND.read_text())
    return found


def render(found: dict[str, dict[str, dict[str, str]]]) -> str:
    """Markdown of the table, the notes, and where transformers 4 differs from 5."""
    notes: list[str] = []
    names = [mode.name for mode in MODES]
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for family, cells in found["5"].items():
        shown = " | ".join(_cell(cells[name], notes) for name in names)
        lines.append(f"| {family} | {shown} |")
    differences = []
    for family, cells in found["4"].items():
        for text in sorted(
            {cells[name] for name in names if cells[name] != found["5"][family][name]}
        ):
            where = [name for name in names if cells[name] == text != found["5"][family][name]]
            differences.append(f"- {family}, {', '.join(where)}: {_cell(text, notes)}")
    if differences:
        lines += ["", "On transformers 4.57 these cells differ:", "", *differences]
    if notes:
        lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]
    return "\n".join(lines)


def page_with(table: str) -> str:
    """The page, with ``table`` between the markers."""
    before, rest = PAGE.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}"


def _cell(text: str, notes: list[str]) -> str:
    if text == WORKS:
        return "yes"
    if text not in notes:
        notes.append(text)
    return f"no ({notes.index(text) + 1})"


def _is_ours(error: Exception) -> bool:
    """Whether the library raised it, and not something that it called."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return Path(santa_torch.__file__).parent in Path(last.filename).parents


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def main() -> None:
    found = load() if FOUND.exists() else {"4": {}, "5": {}}
    found[MAJOR] = {}
    for family in FAMILIES:
        model = family.build()
        found[MAJOR][family.name] = {mode.name: outcome(family, mode, model) for mode in MODES}
        print(family.name, found[MAJOR][family.name], flush=True)
    FOUND.write_text(json.dumps(found, indent=1, sort_keys=False) + "\n")
    if all(found.values()):
        PAGE.write_text(page_with(render(found)))


if __name__ == "__main__":
    main()
