"""The specs that `driftlens init` writes: each loads as it stands, and with every option switched on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from driftlens.base.errors import SpecError
from driftlens.models.architecture import loaders
from driftlens.spec import load_spec
from driftlens.spec.templates import template_names, template_text
from tests.refusing import refusing

OPTION = re.compile(r"^(\s*)#(?=[a-z])", flags=re.MULTILINE)


def test_there_is_a_template_for_every_family() -> None:
    assert template_names() == ["bert", "clip-ta", "flan-t5", "generic", "llama", "vit"]


@pytest.mark.parametrize("name", template_names())
def test_a_template_loads_as_it_stands(name: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(template_text(name), encoding="utf-8")
    spec = load_spec(file)
    assert spec.architecture.loader in loaders, "what is offered can be run"
    assert set(spec.data.tasks) == set(spec.experts), "every task has data"


@pytest.mark.parametrize("name", template_names())
def test_a_template_loads_with_every_option_switched_on(name: str, tmp_path: Path) -> None:
    text, count = OPTION.subn(r"\1", template_text(name))
    assert count >= 2
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="utf-8")
    # `merged` and `merge` are alternatives, so the option replaces the other.
    spec = load_spec(file, ["merged=null"])
    assert spec.merge is not None
    assert spec.compute == load_spec(file, ["merged=null", "compute={}"]).compute, (
        "the values shown are the defaults"
    )


def test_an_unknown_template_is_refused_with_the_nearest_name() -> None:
    with refusing(SpecError, match="there are bert, clip-ta, flan-t5", hint="'clip-ta'"):
        template_text("clip-tb")
