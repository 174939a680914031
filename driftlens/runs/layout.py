"""Names of files and folders inside a run directory."""

from __future__ import annotations

from driftlens.utils.files import escape as escape

MANIFEST = "manifest.json"
SPEC = "spec.yaml"
COMPARISON = "merges.json"
MERGES = "merges"
"""The folder of a run that holds a comparison of other merges of its experts, where one was made."""
STATUS = "status.json"
EVENTS = "events.jsonl"
CANDIDATE = "candidate"
"""The event that tells of a candidate that a choice has tried: `name`, `part`, `share` and its held-out `score`."""
LOCK = "run.lock"
GUARD = "run.lock.guard"
"""Empty file that the operating system locks; `run.lock` says in words who holds it."""

SCRATCH = "scratch"
"""What an interrupted job needs to go on; gone when it is done."""

ENTRIES = (
    *(MANIFEST, SPEC, STATUS, EVENTS, LOCK, GUARD, SCRATCH),
    *(
        "tables",
        "features",
        "models",
        "projections",
        "calibrations",
        "thumbs",
        "figures",
        "reports",
        "logs",
        MERGES,
    ),
)
"""Everything DriftLens puts directly into a run directory."""

VOLATILE = (MANIFEST, STATUS, EVENTS, LOCK, GUARD, SCRATCH, "logs", MERGES)
"""What the manifest's file list leaves out: it changes while nothing of the run does."""

THUMB_SIDE = 64
"""Height and width of a sample's picture, in pixels."""

MOST_THUMBS = 2000
"""Pictures of one task; later samples have none."""

LONGEST_TEXT = 1000
"""Characters of a sample's text that a run keeps; the middle of a longer one is left out."""


def table_file(name: str) -> str:
    """Path of a table, relative to the run directory."""
    return f"tables/{name}.parquet"


def feature_file(task: str, variant: str, layer: int) -> str:
    """Path of the features of one task, variant and layer, relative to the run directory."""
    return f"{feature_folder(task, variant)}/{layer:03d}.npy"


def feature_folder(task: str, variant: str) -> str:
    """Folder of the features of one task and variant, relative to the run directory."""
    return f"features/{escape(task)}/{escape(variant)}"


def thumbs_file(task: str) -> str:
    """Path of the pictures of a task's diagnosis samples, relative to the run directory."""
    return f"thumbs/{escape(task)}.npz"


def texts_file(task: str) -> str:
    """Path of the texts of a task's diagnosis samples, relative to the run directory."""
    return f"thumbs/{escape(task)}.json"


def calibration_folder(name: str) -> str:
    """Folder of a calibration, relative to the run directory."""
    return f"calibrations/{escape(name)}"


def calibration_weights(name: str, *, control: bool = False) -> str:
    """Path of a calibrated model's weights, or of its anchor-only control's, relative to the run directory."""
    return f"{calibration_folder(name)}/{'anchor' if control else 'weights'}.safetensors"


def calibration_attachments(name: str) -> str:
    """Path of what a trained calibration attaches, relative to the run directory; not there for closed forms."""
    return f"{calibration_folder(name)}/attachments.safetensors"


def begun_calibration(name: str) -> str:
    """Path of a file that is there from a calibration's beginning to its end, relative to the run directory.

    Whatever lies beside it is what the calibration, once interrupted, goes on from.
    """
    return f"{SCRATCH}/calibrate-{escape(name)}/settings.json"


def sample_ids_file(task: str) -> str:
    """Path of the sample ids that name the rows of a task's features, relative to the run directory."""
    return f"features/{escape(task)}/sample_ids.json"
