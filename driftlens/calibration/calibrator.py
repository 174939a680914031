"""What calibrators are made of, and the registry that finds them: one file each in this package.

A calibrator owns its settings: the parameters of its constructor, with types, defaults, bounds and help in their
annotations (see `driftlens.base.settings`). Spec, command line, dashboard and model card ask for them there. Its class
says how it is solved for or trained (`calibrated`), and what it needs for that; nobody else asks of which kind it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

from driftlens.base.errors import SpecError, did_you_mean
from driftlens.base.registry import Registry
from driftlens.base.settings import read, settings_of
from driftlens.engine.calibrating import Ground, Method
from driftlens.engine.problems import CalibratedLayer
from driftlens.engine.snapshot import Layerwise
from driftlens.engine.training import AttachmentTrainer


class Calibrator(Method):
    """Settings in the manner of scikit-learn: the constructor only stores them, `check` refuses what can't be.

    Attributes:
        title: what reports print.
        source: the paper.
        presets: published settings by name; what one leaves out keeps its default.
        suited: loader of models -> the preset for its kind, where that isn't the first one.
        candidates: settings, over those at hand, that `--auto` compares; none where it is not asked.
        with_views: defaults of settings where calibration samples have views.
        swept: setting -> factors of what is published for it that a sweep around it tries, each within its bounds.
        of_base: settings among these that mean something beside a base alone.
        effort: processor time of a calibration against FeatCal's, for estimates.
        ablations: settings that each take one part of the method away, for `sweep --ablate`.
        update: kinds of parameters that it changes; none where it only attaches.
        needs_task_id: whether it has another model for every task, so that the task of an input must be known.
    """

    title: ClassVar[str] = ""
    source: ClassVar[str] = ""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    suited: ClassVar[Mapping[str, str]] = {}
    candidates: ClassVar[Sequence[Mapping[str, Any]]] = ()
    with_views: ClassVar[Mapping[str, Any]] = {}
    swept: ClassVar[Mapping[str, Sequence[float]]] = {}
    of_base: ClassVar[Collection[str]] = ()
    effort: ClassVar[float] = 1.0
    ablations: ClassVar[Sequence[Mapping[str, Any]]] = ()
    needs_task_id: ClassVar[bool] = False
    update: Sequence[str] = ()

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The arguments of the constructor and their values; `deep` changes nothing, as nothing is nested."""
        return {name: getattr(self, name) for name in settings_of(type(self)).model_fields}

    def set_params(self, **parameters: Any) -> Self:
        """The calibrator itself, some of its settings changed."""
        known = self.get_params()
        for name, value in parameters.items():
            if name not in known:
                hint = did_you_mean(name, known) or f"It has {', '.join(known)}."
                raise SpecError(f"{type(self).__name__} has no parameter {name!r}", hint=hint)
            setattr(self, name, value)
        return self

    def cost(self, times: float = 1.0) -> float:
        """Processor time against FeatCal's, from so many times the samples."""
        return self.effort * times

    def changed(self, **settings: Any) -> Self:
        """A calibrator like this one, some of its settings changed."""
        return type(self)(**self.get_params() | settings)

    def calibrate(self, ground: Ground) -> Iterator[CalibratedLayer]:
        """What is calibrated, layer by layer in forward order, or task by task where every task has a map of its own.

        Raises:
            SpecError: a setting makes no sense, or a task has no expert in the pool.
            DataError: a task has no samples, or too few.
            NumericsError: weights or features are NaN or infinite; names layer, task and sample.
            SingularGramError: a site can't be solved for as asked; names it.
        """
        self.check(has_base=ground.base is not None)
        return self.calibrated(ground)

    def require_samples(self, count: int, task: str) -> None:
        """Refuse too few samples of a task."""

    @property
    def anchor_reach(self) -> float:
        """The model that solves are pulled towards is base + this * (merged - base); 1 where that is the merged one."""
        return 1.0

    def at_merged(self) -> Self | None:
        """The same calibration, pulled towards the merged model itself; None where there is no other choice."""
        return None

    @classmethod
    def leaves(cls) -> str:
        """What of a calibration leaves the folder."""
        return "a checkpoint and attachments" if cls.needs_task_id else "a checkpoint"

    def __repr__(self) -> str:
        defaults = inspect.signature(type(self)).parameters
        changed = [
            f"{name}={value!r}"
            for name, value in self.get_params().items()
            if value != defaults[name].default
        ]
        return f"{type(self).__name__}({', '.join(changed)})"

    def check(self, *, has_base: bool = True) -> None:
        """Refuse settings that make no sense, by a `SpecError` with the setting, its value and what was expected."""
        read(settings_of(type(self)), self.get_params())


class ClosedFormBase(Calibrator, Layerwise):
    """A calibrator that solves from moments; a subclass adds `solve`."""

    update: Sequence[str] = ("linear", "bias", "norm")


class Trained(Calibrator, AttachmentTrainer):
    """A calibrator that trains a map of the final feature per task; the weights stay as they are.

    A subclass adds `train` and `attachment`.
    """

    needs_task_id = True


def over_preset(method: str, preset: str | None, settings: Mapping[str, object]) -> dict[str, Any]:
    """Settings of a method, over those of a published preset of it where one is named; `resolve` checks them."""
    kind = calibrators[method]
    if preset is not None and preset not in kind.presets:
        raise SpecError(
            f"no preset is called {preset!r}; there are {', '.join(kind.presets) or 'none'}",
            hint=did_you_mean(preset, kind.presets),
        )
    return {**(kind.presets[preset] if preset is not None else {}), **settings}


def require_task_id(task_id: str, method: str) -> None:
    """Refuse a repair that has a map per task where nobody will know the task of an input: `task_id` is `unknown`."""
    if task_id == "unknown" and calibrators[method].needs_task_id:
        raise SpecError(
            f"{method} has a map for every task, and task_id is unknown: nobody will know the task of an input",
            hint="Choose a method that changes weights (featcal, residual), or set task_id: known.",
        )


calibrators: Registry[type[Calibrator]] = Registry(
    "calibrator", "driftlens.calibration", "driftlens.calibrators"
)
"""Names to classes; calling one with settings as keyword arguments gives a calibrator."""
