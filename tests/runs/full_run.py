"""A saved run with everything in it, of any size: for tests of charts, reports, exhibits and the app.

Features come first; every number that follows from features is computed from them, so that tables agree with one
another: drift is variant minus expert, m + p = e, shares and remainder sum to 1, flips follow from scores. What needs
a model (Jacobians, gains) is made up within its range. Nothing here needs torch.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from driftlens.runs.manifest import (
    CalibrationInfo,
    LayerInfo,
    ModelInfo,
    read_manifest,
    sample_ids_digest,
    utc_now,
    write_manifest,
)
from driftlens.runs.schema import TABLES
from driftlens.runs.writer import RunWriter
from driftlens.utils.variants import control_variant
from tests.runs import full_rows
from tests.runs.full_rows import REMAINDER, SITES, Array, Boundary, Samples

__all__ = ["REMAINDER", "SITES", "STRENGTH", "VARIANTS", "Size", "layer_list", "write_full_run", "write_run"]

VARIANTS = ("base", "merged", "baseline:featcal-anchor", "calibrated:featcal")
STRENGTH = {"base": 1.3, "merged": 1.0, "baseline:featcal-anchor": 0.9, "calibrated:featcal": 0.45}
"""How much of the planned drift each variant has; others have 0.7."""


@dataclass(frozen=True)
class Size:
    """How large the run is."""

    blocks: int = 4
    samples: int = 24
    width: int = 8
    classes: int = 3
    tests: int = 400


def layer_list(blocks: int) -> tuple[LayerInfo, ...]:
    """Stem, blocks and head under open_clip's names."""
    inner = [LayerInfo(at + 2, "block", f"visual.transformer.resblocks.{at}") for at in range(blocks)]
    return (LayerInfo(1, "stem", "visual.conv1"), *inner, LayerInfo(blocks + 2, "head", "visual.ln_post"))


def write_full_run(
    path: Path,
    *,
    name: str = "full run",
    tasks: Sequence[str] = ("cars", "mnist", "dtd"),
    variants: Sequence[str] = VARIANTS,
    class_names: Sequence[str] | None = None,
    size: Size | None = None,
    has_labels: bool = True,
    has_heads: bool = True,
    synthetic: bool = False,
    seed: int = 0,
    origin: str = "drawn",
) -> Path:
    """Write a finished run; without labels there are no accuracies and losses, without heads no outputs and shares.

    Most tests want the same few runs: each is computed once per process, then copied under an id and a time of its own.
    `origin` tells data of equal sample ids apart; empty as in runs that were written before it was recorded.
    """
    names = tuple(class_names) if class_names else None
    computed = _computed(
        name,
        tuple(tasks),
        tuple(variants),
        names,
        size or Size(),
        (has_labels, has_heads),
        synthetic,
        seed,
        origin,
    )
    shutil.copytree(computed, path)
    manifest = read_manifest(path)
    own = f"{manifest.id.rpartition('-')[0]}-{secrets.token_hex(4)}"
    write_manifest(path, dataclasses.replace(manifest, id=own, created=utc_now()))
    return path


def write_run(
    path: Path, *, name: str = "small run", tasks: Sequence[str] = ("cars", "mnist"), **options: Any
) -> Path:
    """Write a small finished run of two tasks, of base and merged model, with six samples of each."""
    size = Size(blocks=2, samples=6, width=5)
    options = {"variants": ("base", "merged"), "class_names": ("one", "two", "three")} | options
    return write_full_run(path, name=name, tasks=tasks, size=size, **options)


@functools.cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="driftlens-full-runs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def _computed(
    name: str,
    tasks: tuple[str, ...],
    variants: tuple[str, ...],
    class_names: tuple[str, ...] | None,
    size: Size,
    known: tuple[bool, bool],
    synthetic: bool,
    seed: int,
    origin: str,
) -> Path:
    path = Path(tempfile.mkdtemp(dir=_folder())) / "run"
    made = _Made(variants, size, class_names, known, seed, origin)
    with RunWriter.create(path, spec_yaml=f"name: {name!r}\n", spec_digest="0" * 64, name=name) as writer:
        writer.update_manifest(
            tasks=tasks,
            variants=variants,
            calibrations={name: made.calibration(name, tasks) for name in made.calibrations},
            layers=made.layers,
            synthetic=synthetic,
            device="cpu",
            dtype="float32",
            seeds={"data": seed},
            architecture={"adapter": "open_clip_vit", "loader": "open-clip", "source": "ViT-tiny"},
            preprocessing="PIL",
            models={variant: ModelInfo(f"{at:064x}", 1234) for at, variant in enumerate(variants, start=1)},
            classes=dict.fromkeys(tasks, made.classes),
        )
        for task in tasks:
            with writer.phase(f"analyze:{task}"):
                made.write(writer, task)
        with writer.phase("evaluate"):
            for table, rows in made.rows.items():
                if rows:
                    writer.append(table, full_rows.joined(rows))
    return path


class _Made:
    """Everything of one run, by task."""

    def __init__(
        self,
        variants: Sequence[str],
        size: Size,
        class_names: Sequence[str] | None,
        known: tuple[bool, bool],
        seed: int,
        origin: str,
    ) -> None:
        self._origin = origin
        has_labels, self._has_heads = known
        self.layers = layer_list(size.blocks)
        self.classes = list(class_names or [f"class {at}" for at in range(size.classes)])
        self.calibrations = [v.partition(":")[2] for v in variants if v.startswith("calibrated:")]
        self.rows: dict[str, list[Any]] = {table: [] for table in TABLES if table != "resources"}
        self.rows["calibration"] = [full_rows.calibration_rows(n, self.layers) for n in self.calibrations]
        self._variants, self._size = list(variants), size
        self._rng = np.random.default_rng(seed)
        own = np.arange(size.samples) % len(self.classes)
        self._samples = Samples(_ids("test", size.samples), self.classes, own, has_labels)

    def calibration(self, name: str, tasks: Sequence[str]) -> CalibrationInfo:
        """What the manifest says about a calibration; without a control its anchor is the merged model."""
        control = control_variant(name) if control_variant(name) in self._variants else ""
        settings = {"lam": 0.05, "rho": 2.0 if control else 1.0, "alpha": 0.3, "eps": 1e-8}
        settings |= {"update": ["linear", "bias", "norm"], "anchor": "merged"}
        return CalibrationInfo(
            method="featcal",
            settings={**settings, "last_block_tokens": None, "solve_dtype": "float64"},
            control=control,
            seconds=12.5,
            samples=dict.fromkeys(tasks, self._size.samples),
            sample_digests=dict.fromkeys(tasks, sample_ids_digest(_ids("train", self._size.samples))),
            layers=[layer.index for layer in self.layers[1:-1]],
        )

    def write(self, writer: RunWriter, task: str) -> None:
        """Features and rows of one task."""
        rng, size = self._rng, self._size
        writer.write_sample_ids(task, "calibration", _ids("train", size.samples))
        origin = f"{self._origin} {task}" if self._origin else ""
        writer.write_sample_ids(task, "diagnosis", self._samples.ids, origin)
        writer.write_sample_ids(task, "test", _ids("test", size.tests), origin)
        centres = rng.normal(size=(len(self.classes), size.width))
        hardness = rng.uniform(0.5, 1.5)
        final = self._walk(writer, task, centres, hardness)
        heads = full_rows.unit(centres)
        for variant in self._variants if self._has_heads else ():
            scored = (final[variant], final["expert"], heads, self._samples)
            self.rows["outputs"].append(full_rows.output_rows(task, variant, *scored))
        for variant in self._variants:
            if variant != "base":
                self.rows["params"].append(full_rows.params_rows(task, variant, self.layers, rng))
        if self._samples.has_labels:
            self.rows["accuracy"].append(full_rows.accuracy_rows(task, self._variants, size.tests, hardness))

    def _walk(self, writer: RunWriter, task: str, centres: Array, hardness: float) -> dict[str, Array]:
        """Features and rows of every boundary; the final features by variant."""
        rng, size = self._rng, self._size
        final: dict[str, Array] = {}
        drifts: dict[str, Array] = {}
        for layer in self.layers:
            expert = 2 * centres[self._samples.own] + rng.normal(size=(size.samples, size.width))
            plan = rng.normal(size=expert.shape) * 0.25 * layer.index * hardness
            writer.write_features(task, "expert", layer.index, expert)
            final["expert"] = expert
            for variant in self._variants:
                noise = 0.05 * layer.index * rng.normal(size=plan.shape)
                drift = STRENGTH.get(variant, 0.7) * plan + noise
                share = 0.4 + 0.2 * rng.random()
                mismatch = drift if layer.role == "stem" else share * drift + 0.1 * noise
                parts = (expert, drift, mismatch, drifts.get(variant), STRENGTH["base"] * plan)
                self._add_layer(Boundary(task, variant, layer, *parts))
                writer.write_features(task, variant, layer.index, expert + drift)
                drifts[variant], final[variant] = drift, expert + drift
        return final

    def _add_layer(self, at: Boundary) -> None:
        share = self._share(at.layer) if at.variant != "base" and self._has_heads else None
        cka = 1 - 0.05 * at.layer.index * STRENGTH.get(at.variant, 0.7)
        row = full_rows.layer_row(at, share, self._rng if self._has_heads else None) | {"cka": cka}
        self.rows["layers"].append(row)
        self.rows["samples"].append(full_rows.sample_rows(at, share, self._samples))
        if share is not None:
            self.rows["adjoint"].extend(full_rows.adjoint_rows(at, share, self._samples))

    def _share(self, layer: LayerInfo) -> float:
        """A layer's share of the final drift: little of the stem and the head, more of each later block."""
        shares = np.array([0.1, *np.linspace(0.05, 0.4, self._size.blocks), 0.1])
        return float(shares[layer.index - 1] / shares.sum())


def _ids(part: str, count: int) -> list[str]:
    return [f"{part}/{at}" for at in range(count)]
