"""The page of command options is what the commands declare."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer

from driftlens.cli import GROUPS, app
from tests.command_options import FILE, page

COMMANDS: Any = typer.main.get_command(app)
TEXT = FILE.read_text(encoding="utf-8")


def test_the_page_is_up_to_date() -> None:
    assert page() == TEXT, "run: make options"


@pytest.mark.parametrize("name", [name for names in GROUPS.values() for name in names])
def test_a_command_has_all_its_options_on_the_page(name: str) -> None:
    """Read from the page alone, so that nothing the generator leaves out is missed."""
    section = TEXT.partition(f"\n### {name}\n")[2].partition("\n##")[0]
    declared = {option for parameter in COMMANDS.commands[name].params for option in parameter.opts}
    printed = set(re.findall(r"(?<![\w`-])--?[a-z][a-z-]*", section))
    assert {option for option in declared if option.startswith("-")} <= printed


def test_all_commands_are_on_the_page_and_in_the_overview() -> None:
    assert re.findall(r"^### (\w+)$", TEXT, re.MULTILINE) == [name for names in GROUPS.values() for name in names]
    assert set(COMMANDS.commands) == {name for names in GROUPS.values() for name in names}
    assert len(COMMANDS.commands) == 18
