"""Whether models and samples are still those that a run was made with: rows of two models must not mix."""

from __future__ import annotations

import hashlib

import torch

from driftlens.errors import CheckpointError, DataError
from driftlens.models.sources import TensorsSource, content_digest
from driftlens.pipeline.study.attachments import attachment_tensors
from driftlens.pipeline.study.study import Study
from driftlens.progress import Reporter
from driftlens.records.manifest import Manifest, ModelInfo


def model_info(study: Study, name: str) -> ModelInfo:
    """Digest, number of parameters and origin of one model of the study's pool; reads all its tensors once.

    What is attached counts as part of the model.
    """
    keys = study.pool.chain.parameter_keys()
    source = study.pool.source(name)
    count = sum(torch.Size(source.headers[key].shape).numel() for key in keys)
    digest = content_digest(source, keys)
    attached = attachment_tensors(study.pool.variant(name).attachments)
    if attached:
        digest = hashlib.sha256(
            f"{digest} {content_digest(TensorsSource(name, attached))}".encode()
        ).hexdigest()
        count += sum(value.numel() for value in attached.values())
    return ModelInfo(digest, count, study.provenance.get(name, source.name))


def require_same_models(manifest: Manifest, study: Study, reporter: Reporter) -> None:
    """Refuse models that changed since the run looked at them; their files are read and hashed again.

    Args:
        manifest: of the run, with a digest for every model.
        study: opened anew.
        reporter: told of every model; may cancel.

    Raises:
        CheckpointError: a model is not the one of that name any more.
    """
    names = [name for name in manifest.models if name in study.pool]
    for name in reporter.track(names, "check", lambda name: f"is {name} unchanged?"):
        recorded = manifest.models[name]
        if model_info(study, name).digest != recorded.digest:
            raise CheckpointError(
                f"{name} is not the model that the run was made with: {study.pool.source(name).name} has changed",
                hint="Bring the file back, or analyze the models of today into a run of their own.",
                model=name,
            )


def require_same_samples(manifest: Manifest, study: Study) -> None:
    """Refuse data whose diagnosis or test samples are no longer those that the run's rows are about.

    Raises:
        DataError: a task's sample ids differ from the recorded ones.
    """
    for task, at_hand in study.tasks.items():
        for split, samples in (("diagnosis", at_hand.diagnosis), ("test", at_hand.test)):
            recorded = manifest.sample_ids.get(split, {}).get(task)
            if recorded is not None and samples is not None and list(recorded) != list(samples.ids):
                raise DataError(
                    f"the {split} samples of task {task} are not those of the run: the data has changed",
                    hint="Bring the data back, or analyze the data of today into a run of its own.",
                )
