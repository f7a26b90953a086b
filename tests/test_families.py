"""The support table, cell by cell: model families of transformers against modes of use."""

from __future__ import annotations

from typing import Any

import pytest
import support
import torch
from families import FAMILIES, Family
from modes import MODES, Mode
from support import MAJOR, PAGE

#: Families whose steps are compiled in every run; all together take a minute.
COMPILED = {"Llama", "Gemma-2", "GPT-2", "gpt-oss"}

_BUILT: dict[str, Any] = {}


def built(family: Family) -> Any:
    """One model for all cells of a row."""
    if family.name not in _BUILT:
        _BUILT[family.name] = family.build()
    return _BUILT[family.name]


def cells() -> list[Any]:
    return [
        pytest.param(
            family,
            mode,
            id=f"{family.name}-{mode.name}",
            marks=[pytest.mark.long]
            if mode.name == "compiled step" and family.name not in COMPILED
            else [],
        )
        for family in FAMILIES
        for mode in MODES
    ]


@pytest.mark.parametrize(("family", "mode"), cells())
def test_cell(family: Family, mode: Mode, one_thread: None) -> None:
    assert (
        support.outcome(family, mode, built(family))
        == support.load()[MAJOR][family.name][mode.name]
    )


def working(mode: Mode) -> list[Any]:
    found = support.load()[MAJOR]
    names = {name for name, row in found.items() if row[mode.name] == support.WORKS}
    return [
        pytest.param(family, mode, id=f"{family.name}-{mode.name}")
        for family in FAMILIES
        if family.name in names
    ]


@pytest.mark.parametrize(("family", "mode"), working(MODES[0]) + working(MODES[1]))
@torch.no_grad()
def test_bfloat16(family: Family, mode: Mode, one_thread: None) -> None:
    model = family.build()
    if not any(weight.is_meta for weight in model.parameters()):  # those on disk stay as they are
        model.to(torch.bfloat16)
    mode(model)


def test_the_page_shows_what_was_found() -> None:
    assert PAGE.read_text() == support.page_with(support.render(support.load())), (
        "run python tests/support.py"
    )


def test_every_cell_was_tried_with_both_versions() -> None:
    rows = {family.name: {mode.name for mode in MODES} for family in FAMILIES}
    for version, found in support.load().items():
        assert {name: set(row) for name, row in found.items()} == rows, version
        assert list(found) == [family.name for family in FAMILIES]


def test_llama_works_in_every_mode() -> None:
    """A mistake in a mode would look like a limit of transformers, in all families alike."""
    for version, found in support.load().items():
        assert set(found["Llama"].values()) == {support.WORKS}, version


def test_a_wrong_result_is_no_outcome() -> None:
    wrong = Mode("wrong", lambda model: torch.rand(3))
    with pytest.raises(AssertionError, match="nothing went to the operator"):
        support.outcome(FAMILIES[0], wrong, built(FAMILIES[0]))
