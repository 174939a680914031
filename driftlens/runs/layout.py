"""Names of files and folders inside a run directory."""

from __future__ import annotations

from driftlens.utils.files import escape as escape

MANIFEST = "manifest.json"
SPEC = "spec.yaml"
COMPARISON = "merges.json"
# The folder of a run that holds a comparison of other merges of its experts, where one was made.
MERGES = "merges"
STATUS = "status.json"
EVENTS = "events.jsonl"
# The event of a candidate that `--auto` has tried: `name`, `part`, `share` and held-out `score`.
CANDIDATE = "candidate"
LOCK = "run.lock"
# Empty file that the operating system locks; `run.lock` names the owner.
GUARD = "run.lock.guard"

# State of an interrupted job, removed when the job is done.
SCRATCH = "scratch"

# Everything DriftLens puts directly into a run directory.
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

# Entries that the manifest does not list, because they change while results don't.
VOLATILE = (MANIFEST, STATUS, EVENTS, LOCK, GUARD, SCRATCH, "logs", MERGES)

# Height and width of a sample's picture, in pixels.
THUMB_SIDE = 64

# Largest number of pictures of one task.
MOST_THUMBS = 2000

# Characters of a sample's text that a run keeps; longer texts are cut in the middle.
LONGEST_TEXT = 1000


def table_file(name: str) -> str:
    """Return the path of a table, relative to the run directory."""
    return f"tables/{name}.parquet"


def feature_file(task: str, variant: str, layer: int) -> str:
    """Return the path of the features of one task, variant and layer, relative to the run directory.

    Args:
        task: name of the task.
        variant: name of the variant, "expert" for the task's own.
        layer: index of the layer, 1 the stem.
    """
    return f"{feature_folder(task, variant)}/{layer:03d}.npy"


def feature_folder(task: str, variant: str) -> str:
    """Return the folder of the features of one task and variant, relative to the run directory."""
    return f"features/{escape(task)}/{escape(variant)}"


def thumbs_file(task: str) -> str:
    """Return the path of the pictures of a task's diagnosis samples, relative to the run directory."""
    return f"thumbs/{escape(task)}.npz"


def texts_file(task: str) -> str:
    """Return the path of the texts of a task's diagnosis samples, relative to the run directory."""
    return f"thumbs/{escape(task)}.json"


def calibration_folder(name: str) -> str:
    """Return the folder of a calibration, relative to the run directory."""
    return f"calibrations/{escape(name)}"


def calibration_weights(name: str, *, control: bool = False) -> str:
    """Return the path of a calibrated model's weights, or of its control's, relative to the run directory."""
    return f"{calibration_folder(name)}/{'anchor' if control else 'weights'}.safetensors"


def calibration_attachments(name: str) -> str:
    """Return the path of the modules that a trained calibration adds, relative to the run directory."""
    return f"{calibration_folder(name)}/attachments.safetensors"


def begun_calibration(name: str) -> str:
    """Return the path of a file that exists while a calibration runs or is interrupted, relative to the run directory.

    The same folder holds what the calibration needs to resume.
    """
    return f"{SCRATCH}/calibrate-{escape(name)}/settings.json"


def sample_ids_file(task: str) -> str:
    """Return the path of the sample ids that name the rows of a task's features, relative to the run directory."""
    return f"features/{escape(task)}/sample_ids.json"
