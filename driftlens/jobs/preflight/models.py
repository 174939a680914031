"""Preflight of the models: each opened by itself, so that one that is broken does not hide another."""

from __future__ import annotations

from collections.abc import Callable

from driftlens.base.access import Access
from driftlens.base.errors import DriftLensError, IncompatibleModelsError
from driftlens.base.files import expanded
from driftlens.checkpoints.alignment import KeyLayout
from driftlens.checkpoints.sources import StateSource
from driftlens.checkpoints.stated import is_lora_folder
from driftlens.engine.pool import require_same_parameters
from driftlens.jobs.preflight.outcome import Preflight
from driftlens.jobs.study.opening import OpenModels, dtype_notices, open_models, origins_of
from driftlens.jobs.study.suspicion import label
from driftlens.models.architecture import Architecture
from driftlens.spec import RunSpec


def check_models(spec: RunSpec, architecture: Architecture, checks: Preflight, access: Access) -> OpenModels:
    """The models of a spec that can be opened and fit the architecture; the others become findings."""
    origins, sound = origins_of(spec), set()

    def attempt(name: str, opened: Callable[[], StateSource]) -> StateSource | None:
        try:
            source = opened()
            require_same_parameters(architecture.skeleton, architecture.chain, source)
        except DriftLensError as error:
            lacks_base = spec.base is not None and "base" not in sound and name != "base"
            if lacks_base and _is_part(architecture, origins[name], error):
                text = f"the {label(name)} needs the base, which can't be used, and was not checked"
                checks.notice(label(name), text)
            else:
                checks.problem(label(name), error)
            return None
        sound.add(name)
        checks.ok(label(name), f"{_described(architecture, source)}, from {origins[name]}")
        return source

    models = open_models(spec, access, architecture=architecture, attempt=attempt)
    for text in models.notices:
        checks.notice("models", text)
    for text in dtype_notices(models):
        checks.notice("dtypes", text)
    return models


def _is_part(architecture: Architecture, place: str, error: DriftLensError) -> bool:
    """Whether the model lacks only what a base would have given: LoRA's weights, or the projection."""
    lacks = str(error.context.get("key", "")) if isinstance(error, IncompatibleModelsError) else ""
    layout = architecture.layout
    return is_lora_folder(expanded(place)) or (
        isinstance(layout, KeyLayout) and lacks.endswith(layout.projection)
    )


def _described(architecture: Architecture, source: StateSource) -> str:
    headers = [source.headers[key] for key in architecture.chain.parameter_keys()]
    count = sum(header.nbytes // header.dtype.itemsize for header in headers)
    dtypes = sorted({str(header.dtype).removeprefix("torch.") for header in headers})
    return f"{count:,} parameters in {len(headers)} tensors, {' and '.join(dtypes)}"
