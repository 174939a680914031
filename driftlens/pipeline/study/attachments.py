"""What trained calibrators attach, written into one file of a run and read back."""

from __future__ import annotations

import pathlib
from collections import defaultdict
from collections.abc import Mapping

from torch import Tensor

from driftlens.calibration.calibrator import Trained, calibrators
from driftlens.engine.variant import Attachment, Attachments
from driftlens.errors import CheckpointError
from driftlens.models.loading import open_checkpoint
from driftlens.models.saving import save_state_dict
from driftlens.records.layout import calibration_attachments


def save_attachments(path: pathlib.Path, attachments: Attachments) -> None:
    """Write all attachments of one variant; `boundary/tensor/task` names each tensor.

    Raises:
        RunError: the disk is full.
    """
    save_state_dict(path, attachment_tensors(attachments))


def saved_attachments(run: pathlib.Path, name: str, method: str) -> dict[tuple[str, int], Attachment]:
    """What a finished calibration of a run attaches; nothing for closed forms.

    Args:
        run: the run directory.
        name: of the calibration.
        method: name of its calibrator.

    Raises:
        CheckpointError: the file is damaged, or `method` attaches nothing.
        SpecError: no calibrator is called `method`.
    """
    file = run / calibration_attachments(name)
    if not file.exists():
        return {}
    kind = calibrators[method]
    if not issubclass(kind, Trained):
        raise CheckpointError(
            f"{file} holds attachments, and {method} makes none", hint="Calibrate again under another name."
        )
    source = open_checkpoint(file)
    found: defaultdict[tuple[str, int], dict[str, Tensor]] = defaultdict(dict)
    for key in source.headers:
        boundary, tensor, task = key.split("/", 2)
        found[task, int(boundary)][tensor] = source.read(key)
    return {place: kind.attachment(tensors) for place, tensors in found.items()}


def attachment_tensors(attachments: Attachments) -> Mapping[str, Tensor]:
    """All tensors of some attachments, as they are named in a file."""
    return {
        f"{boundary}/{name}/{task}": value.detach()
        for (task, boundary), attachment in sorted(attachments.items())
        for name, value in attachment.tensors().items()
    }
