"""What tests of the dashboard ask of its pages, inside the test's own process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from streamlit.testing.v1 import AppTest

from driftlens.config.requests import CalibrationRequest
from driftlens.runs.run import open_run
from driftlens_app.calibration import START
from driftlens_app.job_requests import calibrate_request
from driftlens_app.processes import Job, Kind, log_tail, newest_job, poll_job, start_job, write_job_record
from driftlens_app.show import pages
from tests.app.conftest import until

OF_A_RUN = [path.removeprefix("views/").removesuffix(".py") for path, page in pages().items() if page.needs_run]


def said(app: AppTest) -> str:
    """All text of a page with what captions say on hover, without the signs that keep names from being Markdown."""
    kinds = ("title", "header", "caption", "markdown", "info", "warning", "error", "success")
    texts = [str(element.value) for kind in kinds for element in getattr(app, kind)]
    return "\n".join([*texts, *(str(element.help) for element in app.caption)]).replace("\\", "")


def errors(app: AppTest) -> str:
    return "\n".join(element.value for element in app.error).replace("\\", "")


def begin(run: Path, name: str) -> Job:
    return start_job(calibrate_request(open_run(run), CalibrationRequest(name=name)))


def state(run: Path) -> str:
    view = poll_job(run)
    assert view is not None
    return view.state


def newest(run: Path) -> Job:
    """The run's newest job."""
    job = newest_job(run)
    assert job is not None
    return job


def called(run: Path) -> list[str]:
    """The arguments that a page has started the command with."""
    until(lambda: state(run) in ("running", "failed", "done"), "it has begun")
    return log_tail(newest(run).log).splitlines()[0].split()[2:]


def record_job(folder: Path, run: Path, kind: Kind = "calibrate", **values: Any) -> Job:
    """A job that has failed and left no more than its record in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    log, name = folder / f"{kind}-1.log", run.name if kind == "analyze" else "featcal"
    given = {"host": "elsewhere", "started": "2026-01-02T03:04:05.678Z", "code": 1, **values}
    job = Job(kind, name, run, log, 4_000_000, 1.0, **given)
    write_job_record(job)
    return job


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
    return press(app, START)


PROBLEMS = (
    "run.yaml: 2 problems\n  a0: unknown key; allowed here: base\n  data.cars: missing (This *key* is required.)"
)


def failed(root: Path, name: str, said: str = f"error: {PROBLEMS}\nhint: Correct *them*.\n") -> Job:
    """An analysis that ended at once."""
    job = record_job(root / ".driftlens" / name, root / name, "analyze", code=2)
    job.log.write_text(said)
    return job
