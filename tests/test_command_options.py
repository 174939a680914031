"""The page of command options is what the commands declare."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer

from driftlens.cli import GROUPS, build_app
from driftlens_reports.paper.exhibit import exhibits
from tests.command_options import FILE, page

COMMANDS: Any = typer.main.get_command(build_app())
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


@pytest.mark.parametrize("kind", ["figure", "table"])
def test_help_lists_the_ids_of_all_exhibits_and_no_environment_variable(kind: str) -> None:
    options = {option: each for each in COMMANDS.commands["export"].params for option in each.opts}
    told = options[f"--{kind}"].help.partition(": ")[2].partition(".")[0]
    assert re.split(r", | or ", told) == [name for name in exhibits if exhibits[name].kind == kind]
    assert not any(getattr(each, "show_envvar", False) for each in COMMANDS.commands["export"].params)
