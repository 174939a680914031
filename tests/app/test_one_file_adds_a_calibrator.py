"""The form of the page Calibrate is made of what calibrators say of themselves, also of one that one file adds."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from driftlens.runs.writer import RunWriter
from driftlens_app import calibration, processes
from driftlens_app.calibration import START
from tests.app.conftest import Open, catalogue
from tests.app.pages import called, errors, press, said
from tests.contracts.one_file.toys import CLOSED, TRAINED

OF_EVERY_KIND = '''
from collections.abc import Sequence
from typing import Annotated, Literal

from driftlens.calibration.calibrator import ClosedFormBase, calibrators
from driftlens.utils.registry import Bounds, Label


@calibrators.register("toy-kinds")
class ToyKinds(ClosedFormBase):
    """A setting of every kind."""

    title = "Toy of kinds"

    def __init__(
        self,
        share: Annotated[float, Bounds(low=0, high=1), Label("Share σ"), "of *what* is kept"] = 0.5,
        rounds: Annotated[int, Bounds(low=1), "how often"] = 3,
        is_exact: Annotated[bool, "whether to take long"] = False,
        norm: Annotated[Literal["l1", "l2"] | None, "which"] = None,
        parts: Annotated[Sequence[Literal["a", "b", "c"]], "of the model"] = ("a", "b"),
        path: Annotated[str | None, "a name"] = None,
        steps: Annotated[Sequence[int], "one after another"] = (1, 2),
    ) -> None:
        self.share = share

    def solve(self, problem):
        return []
'''
ASKED = """
import sys
sys.path[:0] = {folders!r}
if "--methods" in sys.argv:
    import runpy
    import toy_closed, toy_trained, toy_kinds
    runpy.run_module("driftlens", run_name="__main__")
else:
    from tests.app.worker import main
    sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def toys(worker: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line knows three calibrators more, each from a module of its own; jobs run the stand-in."""
    sources = {"toy_closed": CLOSED, "toy_trained": TRAINED, "toy_kinds": OF_EVERY_KIND}
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
    asked = tmp_path / "asked.py"
    tests = Path(__file__).parents[2]
    asked.write_text(ASKED.format(folders=[str(tmp_path), str(tests)]), encoding="utf-8")
    monkeypatch.setattr(processes, "COMMAND", (sys.executable, str(asked)))
    monkeypatch.setattr(calibration, "run_json_command", processes.run_json_command)


def opened(open_app: Open, root: Path, method: str) -> AppTest:
    app = open_app(root, "repair")
    assert not errors(app)
    app.selectbox(key="calibrator").set_value(method)
    return app.run()


@pytest.mark.slow
def test_the_settings_of_toys_are_fields_whose_values_reach_the_command(
    toys: None, open_app: Open, root: Path
) -> None:
    app = opened(open_app, root, "toy-scale")
    assert app.text_input(key="name").value == "toy-scale"
    assert not [field.key for field in app.number_input if field.key.startswith("featcal.")]
    pull = app.number_input(key="toy-scale.pull")
    assert (pull.label, pull.value, pull.min) == ("pull", None, 0.0) and "How strongly" not in pull.help
    assert "how strongly towards 1" in pull.help and "0.5" in pull.help.replace("\\", "")

    app.selectbox(key="calibrator").set_value("toy-kinds").run()
    assert app.text_input(key="name").value == "toy-kinds"
    share = app.number_input(key="toy-kinds.share")
    assert (share.label, share.max) == ("Share σ", 1.0) and r"\*what\*" in share.help
    assert app.selectbox(key="toy-kinds.is_exact").options == ["on", "off"]
    app.number_input(key="toy-kinds.rounds").set_value(5)
    app.selectbox(key="toy-kinds.is_exact").set_value(True)
    app.selectbox(key="toy-kinds.norm").set_value("l2")
    app.multiselect(key="toy-kinds.parts").set_value(["c", "a"])
    app.text_input(key="toy-kinds.path").set_value("x=1")
    app.text_input(key="toy-kinds.steps").set_value("4, 5")
    press(app, START)
    arguments = called(root / "full")
    assert arguments[2:4] == ["--name=toy-kinds", "--method=toy-kinds"]
    given = re.findall(r"--set=(\w+)=(.*?)(?= --)", " ".join(arguments))
    assert dict(given) == {
        "rounds": "5",
        "is_exact": "true",
        "norm": '"l2"',
        "parts": '["a", "c"]',
        "path": '"x=1"',
        "steps": "[4, 5]",
    }


@pytest.mark.slow
def test_a_trained_one_has_its_own_fields(toys: None, open_app: Open, root: Path) -> None:
    app = opened(open_app, root, "toy-map")
    assert not [box for box in app.checkbox if box.key == "auto"], "nothing that --auto could choose"
    epochs = app.number_input(key="toy-map.epochs")
    assert (epochs.label, epochs.min, epochs.step) == ("epochs", 1, 1)


@pytest.mark.slow
def test_featcal_stands_first_and_presets_are_its_own(open_app: Open, root: Path) -> None:
    app = open_app(root, "repair")
    offered = app.selectbox(key="calibrator").options
    assert offered[0] == "FeatCal" and {*offered} == {at["title"] for at in catalogue()["calibrators"].values()}
    entry = catalogue()["calibrators"]["featcal"]
    preset = app.selectbox(key="featcal preset")
    assert preset.options[1:] == [
        "paper-clip: lam 0.05, rho 2, alpha 0.3",
        "demo-clip: lam 0.05, rho 2.2, alpha 0.25",
        "flan-t5: lam 1e-05, rho 2, alpha 0.6",
        "llama-3b: lam 1e-05, rho 0.5, alpha 0.15",
        "llama-8b: lam 3, rho 0.5, alpha 0.15",
        "embeddings: lam 0.05, rho 3, alpha 0.5",
    ]
    fields = [*app.number_input, *app.selectbox, *app.multiselect, *app.text_input]
    assert {f"featcal.{name}" for name in entry["settings"]} <= {field.key for field in fields}
    labels = [app.number_input(key=f"featcal.{name}").label for name in entry["automatic"]]
    assert labels == ["Anchor ρ", "Target α"]


@pytest.mark.slow
def test_what_a_preset_says_anyway_is_not_repeated(worker: None, open_app: Open, root: Path) -> None:
    app = open_app(root, "repair")
    app.number_input(key="featcal.lam").set_value(0.05)
    app.number_input(key="featcal.rho").set_value(1.0)
    press(app, START)
    assert [part for part in called(root / "full") if part.startswith("--set")] == ["--set=rho=1.0"]


@pytest.mark.slow
def test_published_settings_for_models_of_the_runs_kind_stand_first(worker: None, open_app: Open, root: Path) -> None:
    """And `Best` starts from them, asks for no method, and leaves the fields' values to the choice."""
    with RunWriter.resume(root / "full") as writer:
        for task in writer.manifest.tasks:
            with writer.phase(f"analyze:{task}"):  # without, no calibration could begin
                pass
    manifest = root / "full/manifest.json"
    text = manifest.read_text(encoding="utf-8")
    assert text.count('"open-clip"') == 1
    manifest.write_text(text.replace('"open-clip"', '"hf-decoder"'), encoding="utf-8")
    app = open_app(root, "repair")
    preset = app.selectbox(key="featcal preset")
    assert preset.value == "llama-3b" and [name.partition(":")[0] for name in preset.options[1:3]] == [
        "llama-3b",
        "paper-clip",
    ]
    preset.set_value("paper-clip")
    app.number_input(key="featcal.lam").set_value(0.7)
    press(app, "Find the best repair")
    parts = called(root / "full")
    assert {"--preset=llama-3b", "--auto"} <= {*parts} and not any(part.startswith("--name") for part in parts)
    assert "a merge by Simple Averaging, featcal (llama-3b), residual with" in said(app)
    assert not [part for part in parts if part.startswith(("--set", "--method"))]


@pytest.mark.slow
def test_a_command_that_does_not_answer_is_told_and_asked_again(
    open_app: Open, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(
        "import sys\nprint('error: torch is not *there*\\nhint: Install it.', file=sys.stderr)\nsys.exit(1)"
    )
    monkeypatch.setattr(processes, "COMMAND", (sys.executable, str(broken)))
    monkeypatch.setattr(calibration, "run_json_command", processes.run_json_command)
    app = open_app(root, "repair")
    assert not app.exception and "torch is not *there*" in errors(app) and "Install it." in errors(app)
    assert "Before and after featcal" in [element.value for element in app.header]
    monkeypatch.setattr(calibration, "run_json_command", lambda *_: catalogue())
    assert app.run().number_input(key="featcal.lam").value is None and not app.error
    st.cache_resource.clear()
