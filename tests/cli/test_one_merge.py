"""A merge that is saved: by a method, or as a spec says itself, in Python and at the command line."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import driftlens as dl
from driftlens.config.spec import load_spec
from driftlens.merging.method import merge_methods
from driftlens.utils.errors import NumericsError, RunError, SpecError
from tests.cli.conftest import Cli
from tests.quick import temporary_entries
from tests.refusing import refusing
from tests.zoo.world import World, write_spec

OWN = {"method": "task_arithmetic", "scaling": 0.4}


def same(found: Path, wanted: Path) -> bool:
    ours, theirs = load_file(found), load_file(wanted)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("form", ["file", "values", "spec"])
def test_a_spec_makes_its_own_merge(world: World, spec_file: Path, tmp_path: Path, run_cli: Cli, form: str) -> None:
    values = world.spec(merge=OWN)
    wanted, file = tmp_path / "wanted.safetensors", write_spec(spec_file, values)
    given: Any = {"file": file, "values": values, "spec": load_spec(values)}[form]
    dl.merge(values, method="task_arithmetic", parameters={"scaling": 0.4}, out=wanted)
    assert same(dl.merge(given, out=tmp_path / "own.safetensors"), wanted)
    assert run_cli("merge", file, "--out", tmp_path / "cli.safetensors").code == 0
    assert same(tmp_path / "cli.safetensors", wanted)


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no place": (
        {"method": "ties"},
        "no output path is set",
        "`--out merged.safetensors` or `--out FOLDER`",
    ),
    "no method": (
        {"parameters": {"scaling": 0.3}, "out": "x"},
        "--set needs --method",
        "`driftlens doctor --methods` lists",
    ),
    "no merge": (
        {"out": "x"},
        "the spec 'tiny open_clip' names a merged model, so there is nothing to merge",
        "Pass --method, or",
    ),
}


@pytest.mark.parametrize(("keywords", "message", "hint"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_merge_is_refused(world: World, keywords: dict[str, Any], message: str, hint: str) -> None:
    with refusing(SpecError, match=message, hint=hint):
        dl.merge(world.spec(merge=None, merged={"weights": str(world.weights("base"))}), **keywords)


def test_what_is_lost_by_a_number_type_is_told_in_both_ways(
    world: World, spec_file: Path, tmp_path: Path, run_cli: Cli, caplog: pytest.LogCaptureFixture
) -> None:
    values = world.spec(merge={"method": "task_arithmetic", "scaling": 0.01})
    dl.merge(values, out=tmp_path / "own.safetensors", out_dtype="bfloat16")
    file, place = write_spec(spec_file, values), tmp_path / "cli.safetensors"
    said = run_cli("merge", file, "--out", place, "--out-dtype", "bfloat16").err
    told = [record.getMessage() for record in caplog.records if record.name == "driftlens"]
    assert any("bfloat16" in text for text in told) and all(f"notice: {text}" in said for text in told)


def test_numbers_that_a_merge_makes_infinite_are_not_laid_at_a_checkpoints_door(world: World, tmp_path: Path) -> None:
    with temporary_entries(merge_methods):

        @merge_methods.method("large", title="Large", source="none", laws=set())
        def large(base: dict[str, torch.Tensor], experts: object) -> dict[str, torch.Tensor]:
            return {name: torch.full_like(value, 1e6) for name, value in base.items()}

        with pytest.raises(NumericsError, match="NaN or infinite") as caught:
            dl.merge(world.spec(), method="large", out=tmp_path / "x.safetensors", out_dtype="float16")
    assert "too large for float16. Try other settings or another --out-dtype" in caught.value.hint
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("there", ["base", "expert", "something"])
def test_no_file_that_is_there_is_replaced(world: World, tmp_path: Path, there: str) -> None:
    spec = world.one_task()
    place = tmp_path / "something.safetensors"
    place.write_bytes(b"of the user's")
    if there != "something":
        entry = spec["base"] if there == "base" else next(iter(spec["experts"].values()))
        place = Path(shutil.copy(entry["weights"], tmp_path / f"{there}.safetensors"))
        entry["weights"] = str(place)
    held = place.read_bytes()
    with refusing(RunError, f"{place} exists already", hint="another path"):
        dl.merge(spec, out=place)
    assert place.read_bytes() == held
