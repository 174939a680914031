"""What tests of the dashboard ask of its pages, inside the test's own process."""

from __future__ import annotations

from pathlib import Path

from streamlit.testing.v1 import AppTest

from driftlens.runs.run import open_run
from driftlens.spec.requests import CalibrationRequest
from driftlens_app.jobs import Job, start, watch
from driftlens_app.jobs.record import write_job
from driftlens_app.jobs.requests import calibrate_request
from driftlens_app.pages import pages

OF_A_RUN = [
    path.removeprefix("views/").removesuffix(".py") for path, page in pages().items() if page.needs_run
]


def said(app: AppTest) -> str:
    """All text of a page with what captions say on hover, without the signs that keep names from being Markdown."""
    kinds = ("title", "subheader", "caption", "markdown", "info", "warning", "error", "success")
    texts = [str(element.value) for kind in kinds for element in getattr(app, kind)]
    return "\n".join([*texts, *(str(element.help) for element in app.caption)]).replace("\\", "")


def errors(app: AppTest) -> str:
    return "\n".join(element.value for element in app.error).replace("\\", "")


def begin(run: Path, name: str) -> Job:
    return start(calibrate_request(open_run(run), CalibrationRequest(name=name)))


def state(run: Path) -> str:
    view = watch(run)
    assert view is not None
    return view.state


def step(run: Path, number: int) -> None:
    (run.parent / f"step-{number}").touch()


def finish(run: Path) -> None:
    for number in range(3):
        step(run, number)


def press(app: AppTest, label: str) -> AppTest:
    (button,) = [button for button in app.button if button.label == label]
    assert not button.disabled
    return button.click().run()


def is_disabled(app: AppTest, label: str) -> bool:
    (button,) = [button for button in app.button if button.label == label]
    return bool(button.disabled)


def calibrate_as(app: AppTest, name: str) -> AppTest:
    app.text_input(key="name").set_value(name)
    return press(app, "FeatCal calibrate")


PROBLEMS = "run.yaml: 2 problems\n  a0: unknown key; allowed here: base\n  data.cars: missing (This *key* is required.)"


def failed(root: Path, name: str, said: str = f"error: {PROBLEMS}\nhint: Correct *them*.\n") -> Job:
    """An analysis that ended at once."""
    folder = root / ".driftlens" / name
    folder.mkdir(parents=True)
    log = folder / "analyze-1.log"
    log.write_text(said)
    job = Job(
        "analyze", name, root / name, log, 4_000_000, 1.0, "elsewhere", "2026-01-02T03:04:05.000Z", code=2
    )
    write_job(job)
    return job
