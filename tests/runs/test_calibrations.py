"""Calibrations inside a run: unseen until they are whole, gone without a trace, and nobody else's rows move."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from driftlens.runs import writer as writing
from driftlens.runs.manifest import CalibrationInfo, ModelInfo, read_manifest
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.verify import verify_files
from driftlens.runs.writer import RunWriter
from tests.runs.full_run import write_run
from tests.runs.stopping import stopping

NAME, VARIANT, CONTROL = "featcal", "calibrated:featcal", "baseline:featcal-anchor"
OTHERS = ("base", "merged", "baseline:surgery", "calibrated:featcal2")
TABLES = ("layers", "samples", "outputs", "params", "accuracy", "calibration", "resources")
INFO = CalibrationInfo(
    "featcal",
    {"lam": 0.05, "update": ["linear"]},
    CONTROL,
    1.5,
    {"cars": 8},
    {"cars": "ab"},
    (2, 3),
    notices=("a notice",),
)


def history(name: str) -> pd.DataFrame:
    return pd.DataFrame([{"name": name, "layer": 2, "site": f"blocks.{at}", "lam": 0.05} for at in range(2)])


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a calibration of another name, whose name begins like ours."""
    folder = write_run(tmp_path_factory.mktemp("runs") / "run", variants=OTHERS)
    with RunWriter.resume(folder) as writer:
        writer.append("calibration", history("featcal2"))
        writer.update_manifest(calibrations={"featcal2": INFO}, notices=["calibrated:featcal2: stays"])
    return folder


@pytest.fixture(scope="module")
def whole(without: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with ours beside it."""
    folder = shutil.copytree(without, tmp_path_factory.mktemp("runs") / "run")
    with RunWriter.resume(folder) as writer:
        writer.begin_variants([CONTROL, VARIANT])
        write_calibration(writer, folder)
        writer.finish_variants([CONTROL, VARIANT], calibrations={NAME: INFO}, notices=[f"{VARIANT}: goes"])
    return folder


def write_calibration(writer: RunWriter, folder: Path) -> None:
    """Rows and files of both variants: those of the merged model under other names."""
    for table in ("layers", "samples", "outputs", "params", "accuracy"):
        merged = getattr(open_run(folder), table)(variant="merged")
        for variant in (CONTROL, VARIANT):
            writer.append(table, merged.assign(variant=variant))
    for variant in (CONTROL, VARIANT):
        writer.write_features("cars", variant, 4, np.ones((6, 5)))
    with writer.phase(f"calibrate:{NAME}"):
        writer.append("calibration", history(NAME))
    with (
        writer.phase(f"calibrate:{NAME}:analyze:cars"),
        writer.file(f"calibrations/{NAME}/config.yaml") as file,
    ):
        file.write_text("name: featcal\n")
    writer.update_manifest(models={VARIANT: ModelInfo("2" * 64, 7), CONTROL: ModelInfo("3" * 64, 7)})
    writer.warn(f"task cars, {VARIANT}: did not converge")


@pytest.fixture
def own(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "run")


def frames(run: DriftRun) -> dict[str, pd.DataFrame]:
    return {table: getattr(run, table)() for table in TABLES}


def same(found: dict[str, pd.DataFrame], expected: dict[str, pd.DataFrame]) -> None:
    for table, frame in expected.items():
        pd.testing.assert_frame_equal(found[table], frame, check_exact=True, obj=table)


def test_an_entry_of_the_manifest_is_read_back_as_it_was_written(whole: Path) -> None:
    found = open_run(whole).manifest.calibrations
    assert list(found) == ["featcal2", NAME]
    assert found[NAME].settings == INFO.settings and found[NAME].control == CONTROL
    assert (found[NAME].samples, found[NAME].sample_digests) == (INFO.samples, INFO.sample_digests)
    assert tuple(found[NAME].layers) == INFO.layers and tuple(found[NAME].notices) == INFO.notices


def test_a_variant_is_seen_when_it_is_whole_and_not_before(without: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(without, tmp_path / "run")
    before = frames(open_run(folder))
    with RunWriter.resume(folder) as writer:
        writer.begin_variants([CONTROL, VARIANT])
        write_calibration(writer, folder)
        half = open_run(folder)
        assert VARIANT not in half.variants and CONTROL not in half.variants
        found = frames(half)
        found["resources"] = found["resources"][: len(before["resources"])]  # those of earlier phases
        same(found, before)
        writer.finish_variants([CONTROL, VARIANT], calibrations={NAME: INFO})
        run = open_run(folder)
        assert run.variants == (*OTHERS, CONTROL, VARIANT)
        for table in ("layers", "samples", "outputs", "params", "accuracy"):
            assert not getattr(run, table)(variant=VARIANT).empty, table
        assert len(run.calibration(NAME)) == 2


def test_removing_leaves_the_run_that_was_there_before(own: Path, without: Path) -> None:
    with RunWriter.resume(own) as writer:
        writer.remove_calibration(NAME)
    same(frames(open_run(own)), frames(open_run(without)))
    left, before = read_manifest(own), read_manifest(without)
    for entry in ("variants", "unfinished", "calibrations", "models", "phases", "warnings", "notices"):
        assert getattr(left, entry) == getattr(before, entry), entry
    assert set(left.files) == set(before.files) and verify_files(own).ok
    assert not (own / "calibrations" / NAME).exists()
    assert not list((own / "features").rglob("*featcal")), "no folder of features should be left"


def test_removing_what_is_not_there_changes_nothing(without: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(without, tmp_path / "run")
    with RunWriter.resume(folder) as writer:
        writer.remove_calibration("nosuch")
    same(frames(open_run(folder)), frames(open_run(without)))
    assert verify_files(folder).ok


STOPS = ("write_manifest", "table_without_rows", "remove_tree")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "call"), [(name, call) for name in STOPS for call in range(3)], ids=lambda value: str(value)
)
def test_a_removal_that_is_stopped_hides_everything_and_the_next_one_finishes_it(
    own: Path, without: Path, monkeypatch: pytest.MonkeyPatch, function: str, call: int
) -> None:
    writer = RunWriter.resume(own)
    with monkeypatch.context() as patch:
        patch.setattr(writing, function, stopping(getattr(writing, function), call))
        with pytest.raises(KeyboardInterrupt), writer:
            writer.remove_calibration(NAME)
    half = open_run(own)
    if (function, call) != ("write_manifest", 0):
        assert VARIANT not in half.variants and CONTROL not in half.variants
        hidden = frames(half)
        del hidden["resources"]
        same(hidden, {table: frame for table, frame in frames(open_run(without)).items() if table in hidden})
    assert not verify_files(own).missing and not verify_files(own).changed
    with RunWriter.resume(own) as writer:
        writer.remove_calibration(NAME)
    same(frames(open_run(own)), frames(open_run(without)))
    assert verify_files(own).ok


def test_events_hold_numbers_that_json_knows(own: Path) -> None:
    with RunWriter.resume(own) as writer:
        writer.event("layer", layer=3, drift_l2_mean=float("nan"), objective_after=0.5)
    events = [json.loads(line) for line in (own / "events.jsonl").read_text().splitlines()]
    (found,) = [event for event in events if event["event"] == "layer"]
    assert (found["layer"], found["drift_l2_mean"], found["objective_after"]) == (3, None, 0.5)


def test_scratch_belongs_to_no_list_and_goes_with_the_run(own: Path) -> None:
    (own / "scratch" / "calibrate-x").mkdir(parents=True)
    (own / "scratch" / "calibrate-x" / "002.safetensors").write_bytes(b"half")
    with RunWriter.resume(own):
        pass
    assert verify_files(own).ok and not any("scratch" in name for name in read_manifest(own).files)
    with RunWriter.create(own, spec_yaml="", spec_digest="", name="next", force=True):
        assert not (own / "scratch").exists()
