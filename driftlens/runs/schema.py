"""Declaration of the tables of a run: type, unit, range and meaning of every column. Entry point: `TABLES`.

It needs neither pandas nor torch; `tables.py` converts to frames and Parquet files. Within one major version of the
schema, columns and tables are only ever added.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

from driftlens.utils.errors import RunError, SchemaTooNewError
from driftlens.utils.registry import ANY, ColumnSchema as ColumnSchema, Range, Worse
from driftlens.utils.variants import METRICS

# Raise the minor version with each added column or table. Older versions then refuse to write to such runs, because
# they would drop the columns; a new major version they refuse to read.
SCHEMA_VERSION = "1.9"

NOT_NEGATIVE: Range = (0.0, None)
SHARE: Range = (0.0, 1.0)
COSINE: Range = (-1.0, 1.0)

# The commands that measure again, and that trace the drift of a measured run back to layers.
ANALYZE, EXPLAIN = "driftlens analyze RUN/spec.yaml --out NEW", "driftlens analyze RUN"
# The command that adds a calibrated variant.
CALIBRATE = "driftlens calibrate RUN --name featcal"
# Options of the attribution, on by default; `EXPLAIN` measures their columns.
ATTRIBUTED = ("jacobian", "contributions", "prefix")


@dataclass(frozen=True)
class TableSchema:
    """The schema of one table: `key` columns first, never null; `command` computes a table that a run lacks."""

    name: str
    key: tuple[str, ...]
    columns: tuple[ColumnSchema, ...]
    command: str = ANALYZE

    def __post_init__(self) -> None:
        names = self.names
        assert names[: len(self.key)] == self.key and len(set(names)) == len(names), names

    @property
    def names(self) -> tuple[str, ...]:
        """The column names, in stored order."""
        return tuple(column.name for column in self.columns)

    def column(self, name: str) -> ColumnSchema:
        """Return the schema of the column called `name`."""
        return {column.name: column for column in self.columns}[name]

    def select_columns(self, *names: str) -> tuple[ColumnSchema, ...]:
        """Return the schemas of the columns with these names."""
        return tuple(self.column(name) for name in names)

    def command_to_fill(self, names: Iterable[str], *, is_explained: bool = False) -> str:
        """Return the command that computes these columns for a run that lacks them.

        If the attribution is measured already (`has_attribution`), a missing part of it has to be named.
        """
        columns = set(names)
        options = dict.fromkeys(entry.option for entry in self.columns if entry.name in columns and entry.option)
        if not options or any(not self.column(name).option for name in columns & {*self.names}):
            return self.command
        named = [name for name in options if is_explained or name not in ATTRIBUTED]
        return f"{EXPLAIN} --add {','.join(named)}" if named else EXPLAIN

    def with_columns(self, columns: Iterable[ColumnSchema]) -> TableSchema:
        """Return the table schema with additional columns appended."""
        new = {column.name: column for column in columns if column.name not in self.names}
        return replace(self, columns=(*self.columns, *new.values())) if new else self


def _text_column(name: str, meaning: str) -> ColumnSchema:
    return ColumnSchema(name, "str", "", meaning)


def _count_column(name: str, unit: str, meaning: str) -> ColumnSchema:
    return ColumnSchema(name, "int", unit, meaning, None, NOT_NEGATIVE)


def _number_column(name: str, meaning: str, worse: Worse = None, limits: Range = NOT_NEGATIVE) -> ColumnSchema:
    return ColumnSchema(name, "float", "1", meaning, worse, limits)


def _norm_column(name: str, meaning: str) -> ColumnSchema:
    return ColumnSchema(name, "float", "feature", meaning, "higher", NOT_NEGATIVE)


def _score_column(name: str, meaning: str, worse: Worse = "higher", unit: str = "score") -> ColumnSchema:
    return ColumnSchema(name, "float", unit, meaning, worse, NOT_NEGATIVE)


def _score_gain_column(name: str, meaning: str) -> ColumnSchema:
    return _score_column(name, meaning, unit="score/feature")


def _optional_columns(option: str, *columns: ColumnSchema) -> tuple[ColumnSchema, ...]:
    return tuple(replace(column, option=option) for column in columns)


def _share_column(name: str, meaning: str, option: str) -> ColumnSchema:
    return ColumnSchema(name, "float", "1", meaning, option=option)


def _interval_columns(share: str, option: str = "", over: str = "jacobian_samples") -> tuple[ColumnSchema, ...]:
    meaning = f"end of the 95 % interval of {share} over the {over} (bootstrap)."
    ends = (("low", "Lower"), ("high", "Upper"))
    return tuple(_share_column(f"{share}_{end}", f"{words} {meaning}", option) for end, words in ends)


def _drift_norm_columns() -> tuple[ColumnSchema, ...]:
    statistics = {
        "mean": "Mean",
        "std": "Standard deviation (divided by n; intervals divide by n - 1)",
        "median": "Median",
        "q10": "10 % quantile",
        "q25": "25 % quantile",
        "q75": "75 % quantile",
        "q90": "90 % quantile",
    }
    meaning = "over samples of the norm of the drift (feature minus expert feature) leaving the layer."
    return tuple(_norm_column(f"drift_l2_{short}", f"{words} {meaning}") for short, words in statistics.items())


TASK = _text_column("task", "Task: a data set and its expert.")
VARIANT = _text_column("variant", "Measured model: base, expert, merged, calibrated:NAME or baseline:NAME.")
LAYER = ColumnSchema("layer", "int", "", "Layer in forward order, from 1, the stem.", None, (1.0, None))
SAMPLE_ID = _text_column("sample_id", "The sample, as its data source names it.")
METRIC = _text_column("metric", "Metric of the score, for example accuracy.")
LABEL = _text_column("label", "Class of the sample in its data source.")

LAYERS = TableSchema(
    "layers",
    ("task", "variant", "layer"),
    (
        TASK,
        VARIANT,
        LAYER,
        _text_column("role", "stem, block or head."),
        _text_column("stream", "Features that leave the layer: encoder (of an encoder-decoder) or hidden."),
        _text_column("path", "Module path in the library's own names."),
        _count_column("n", "samples", "Number of samples."),
        _text_column("reference", "Model whose features the local mismatch is computed on: expert or merged."),
        *_drift_norm_columns(),
        _number_column("drift_rel", "Drift norm against the expert's feature norm.", "higher"),
        _number_column("drift_vs_base", "Drift norm against the distance from base to expert.", "higher"),
        _number_column("cos_mean", "Mean cosine to the expert's feature.", "lower", COSINE),
        _number_column("cos_std", "Standard deviation of that cosine (divided by n).", "higher"),
        _norm_column("mismatch_l2_mean", "Mean norm of the layer's local mismatch m."),
        _norm_column("propagation_l2_mean", "Mean norm of p, the drift that the layer propagates."),
        _number_column("cross_term", "2 <m, p> / |e|^2: positive where mismatch and propagation add up.", None, ANY),
        _norm_column("residual_l2_mean", "Mean norm of p minus the incoming drift; residual layers only."),
        _number_column(
            "rerouted", "Share of tokens routed otherwise than in the expert; mixtures only.", "higher", SHARE
        ),
        _norm_column("rerouted_l2_mean", "Mean norm of c, the feature change from that routing; mixtures only."),
        _number_column("rerouted_share", "<c, e> / |e|^2: share of the drift from routing; mixtures only.", None, ANY),
        _number_column("amplification", "Norm of p against that of the incoming drift.", "higher"),
        *_interval_columns("amplification", over="n samples"),
        _number_column("gain_excess_mean", "Mean of gamma, the amplification minus 1.", "higher", (-1.0, None)),
        _number_column("mismatch_ratio_mean", "Mean of eta, the norm of m against the incoming drift's.", "higher"),
        _number_column("growth_holds", "Share of samples whose gamma exceeds eta.", "higher", SHARE),
        _share_column("final_share", "Signed share of the final drift from this layer's m.", "contributions"),
        _share_column("prefix_share", "Signed share of the final drift by swapping prefixes; sums to 1.", "prefix"),
        *_interval_columns("final_share", "contributions"),
        *_interval_columns("prefix_share", "prefix"),
        _share_column(
            "remainder_share", "Share of the final drift in no final_share; head row only.", "contributions"
        ),
        _number_column("closure_error", "|e - e_library| / |e| against ordinary passes of the models.", "higher"),
        *_optional_columns(
            "jacobian",
            _number_column("jacobian_error", "|p - A e| / |p|, A: averaged Jacobian; up to 8 samples.", "higher"),
            _count_column("nodes", "nodes", "Quadrature nodes for A."),
            _count_column("jacobian_samples", "samples", "Samples for the columns that need A."),
        ),
        *_optional_columns(
            "jacobian.spectral",
            _number_column("spectral_norm_mean", "Mean spectral norm of A.", "higher"),
            _number_column("spectral_residual_max", "Largest residual of the power iterations for it.", "higher"),
        ),
        *_optional_columns(
            "jacobian",
            _number_column("random_gain_mean", "Mean gain of A in random directions; up to 8 samples."),
        ),
        *_optional_columns(
            "cka", _number_column("cka", "Linear CKA with the expert's, debiased.", "lower", (None, 1.0))
        ),
    ),
)

SAMPLES = TableSchema(
    "samples",
    ("task", "variant", "layer", "sample_id"),
    (
        TASK,
        VARIANT,
        LAYER,
        SAMPLE_ID,
        LABEL,
        _norm_column("drift_l2", "Norm of the drift leaving the layer."),
        _number_column("cos", "Cosine to the expert's feature.", "lower", COSINE),
        _norm_column("mismatch_l2", "Norm of the local mismatch."),
        _norm_column("propagation_l2", "Norm of the drift that the layer propagates."),
        _number_column("amplification", "Norm of the propagation against that of the incoming drift.", "higher"),
        _share_column("final_share", "Signed share of the sample's final drift.", "contributions"),
    ),
)

OUTPUTS = TableSchema(
    "outputs",
    ("task", "variant", "sample_id"),
    (
        TASK,
        VARIANT,
        SAMPLE_ID,
        LABEL,
        _text_column("expert_pred", "Class that the expert predicts."),
        _text_column("pred", "Class that the variant predicts."),
        ColumnSchema("flipped", "bool", "", "True if the two differ.", "higher"),
        _score_column("score_drift_l2", "Euclidean norm of the score drift."),
        _score_column("score_drift_inf", "Largest change of one score."),
        _score_gain_column("score_gain_secant", "Norm of the score drift against that of the final drift."),
        _score_gain_column("score_gain", "Largest gain along the drift at points between expert and variant."),
        _score_gain_column(
            "score_gain_spectral", "Largest gain in any direction at those points, by power iteration."
        ),
        _score_gain_column(
            "score_gain_certified", "Upper bound of the gain between expert and variant (closed form)."
        ),
        _score_column("score_bound", "Bound of the score drift: certified gain * final drift + score_map_mismatch."),
        _score_column("score_map_mismatch", "Norm of the score change from different heads alone."),
        _score_column("margin", "Expert's best score minus its second best.", "lower"),
        ColumnSchema("certified", "bool", "", "True if the drift can't flip the prediction.", "lower"),
        _score_column("ce", "Cross-entropy of the variant.", unit="nat"),
        _score_column("ce_expert", "Cross-entropy of the expert.", unit="nat"),
        _number_column("confidence", "Largest class probability of the variant.", None, SHARE),
        _number_column("confidence_expert", "Largest class probability of the expert.", None, SHARE),
        _score_column("kl", "Divergence of the variant's class probabilities from the expert's.", unit="nat"),
        _score_column("token_kl", "Divergence of the next token over the whole vocabulary.", unit="nat"),
        ColumnSchema("token_flipped", "bool", "", "True if the most likely next token differs.", "higher"),
        ColumnSchema("token_certified", "bool", "", "True if the drift is too small to change it.", "lower"),
        _number_column("softmax_integral_error", "Self-check: error of the softmax integral identity.", "higher"),
        _score_column("ce_integral_error", "Self-check: error of the cross-entropy identity.", unit="nat"),
    ),
)

ADJOINT = TableSchema(
    "adjoint",
    ("task", "variant", "target", "layer", "sample_id"),
    (
        TASK,
        VARIANT,
        _text_column("target", "Attributed quantity: final_drift (share), loss (nat) or margin (score)."),
        LAYER,
        SAMPLE_ID,
        *_optional_columns(
            "adjoint",
            ColumnSchema("part", "float", "of the target", "Part of the change from the layer's m."),
            ColumnSchema("change", "float", "of the target", "Change of the target from expert to variant."),
            ColumnSchema("remainder", "float", "of the target", "Change of no layer; head row only."),
        ),
    ),
)

ROUTING = TableSchema(
    "routing",
    ("task", "variant", "layer", "expert"),
    (
        TASK,
        VARIANT,
        LAYER,
        ColumnSchema("expert", "int", "", "Number of the expert in its mixture, from 0.", None, NOT_NEGATIVE),
        _count_column("tokens", "tokens", "Tokens of the diagnosis samples routed to it."),
        _number_column("gate_mean", "Mean gate weight of the expert for them; empty without tokens."),
    ),
)

PARAMS = TableSchema(
    "params",
    # A stem of one module shares its path with that module, so the scope is part of the key.
    ("variant", "task", "scope", "path"),
    (
        VARIANT,
        TASK,
        _text_column("scope", "module, layer, group of modules by role, or backbone."),
        _text_column("path", "Path of the module or layer; name of the group; empty for the backbone."),
        _number_column("cos", "Cosine of the variant's task vector to the expert's.", "lower", COSINE),
        _number_column("norm_ratio", "Norm of the variant's task vector against the expert's."),
        _number_column("sign_agreement", "Share of entries whose signs agree.", "lower", SHARE),
    ),
)

ACCURACY = TableSchema(
    "accuracy",
    ("task", "variant", "metric"),
    (
        TASK,
        VARIANT,
        METRIC,
        _number_column("value", "The score; range and direction are the metric's.", None, ANY),
        _count_column("n", "samples", "Test samples."),
        _number_column("ci_low", "Lower end of the 95 % interval: Wilson's for shares, else bootstrap.", None, ANY),
        _number_column("ci_high", "Upper end of that interval.", None, ANY),
        ColumnSchema("seed", "int", "", "Seed of the test samples."),
    ),
    "driftlens analyze RUN",
)

SCORES = TableSchema(
    "scores",
    ("task", "variant", "metric", "sample_id"),
    (
        TASK,
        VARIANT,
        METRIC,
        SAMPLE_ID,
        _number_column("value", "1 or 0 for shares, the number for spearman, nats for perplexity.", None, ANY),
        _number_column("reference", "Expected number for spearman, target tokens for perplexity.", None, ANY),
        _text_column("answer", "Answer that the variant generated or chose."),
        _text_column("target", "Expected answer."),
    ),
    "driftlens analyze RUN",
)

CALIBRATION = TableSchema(
    "calibration",
    ("name", "layer", "site"),
    (
        _text_column("name", "Calibration; the variant is calibrated:NAME."),
        LAYER,
        _text_column("site", "Calibrated module, in the library's own names."),
        _text_column("kind", "Kind of the solve."),
        _number_column("lam", "Ridge, relative to a Gram matrix of norm 1."),
        _number_column("objective_before", "Objective at the merged parameters.", "higher"),
        _number_column("objective_after", "Objective at the calibrated parameters.", "higher"),
        _number_column("weight_change", "|dW|_F / |W|_F."),
        _number_column("condition_estimate", "Estimated condition of the system solved.", "higher", (1.0, None)),
        ColumnSchema("seconds", "float", "s", "Time spent on the site.", None, NOT_NEGATIVE),
        _number_column("smallest_eigenvalue", "Estimated smallest eigenvalue of the system solved.", "lower"),
        _number_column("task_weight_sum", "Sum over tasks of the weights of their Gram matrices."),
        _number_column("task_weight_share", "Share of a bias that tasks, not the anchor, determine.", None, SHARE),
        _number_column("upstream_ridge", "Ridge of the repair of errors from earlier modules."),
        _number_column("upstream_share", "Share of that repair that held-out samples support.", None, SHARE),
        _number_column(
            "stationarity_error", "|W S v - R v| / (|W S v| + |R v|) of W S = R, v one direction.", "higher"
        ),
        _count_column("num_rows", "rows", "Tokens that an expert of a mixture was solved from; else empty."),
        _number_column("routes_before", "Routers in older runs: share of tokens routed right.", "lower", SHARE),
        _number_column("routes_after", "The same for the calibrated router.", "lower", SHARE),
    ),
    CALIBRATE,
)

SWEEPS = TableSchema(
    "sweeps",
    ("sweep", "point", "seed", "task"),
    (
        _text_column("sweep", "Varied settings joined by `+`, or `control` (rho 1), after METHOD:."),
        ColumnSchema("point", "int", "", "Place of the settings in the sweep, from 0.", None, (0.0, None)),
        ColumnSchema("seed", "int", "", "Seed of the calibration samples."),
        TASK,
        _number_column("lam", "Ridge, relative to a Gram matrix of norm 1."),
        _number_column("rho", "Position of the anchor from base (0) to merged (1); beyond, extrapolated.", None, ANY),
        _number_column("alpha", "Share of the expert's features in the target.", None, SHARE),
        _count_column("n", "samples", "Calibration samples per task."),
        _norm_column("drift_l2_mean", "Mean norm of the final drift on the diagnosis samples."),
        _number_column("drift_rel", "Final drift norm against the expert's feature norm.", "higher"),
        _number_column("cos_mean", "Mean cosine of the final feature to the expert's.", "lower", COSINE),
        *(
            _number_column(metric.name, metric.full_description, metric.worse, metric.range)
            for metric in METRICS.values()
        ),
        _count_column("n_test", "samples", "Test samples of the scores."),
        ColumnSchema("seconds", "float", "s", "Time of the calibration.", None, NOT_NEGATIVE),
        _text_column("method", "The calibrator."),
        _text_column("settings", "All its settings, as JSON."),
        _text_column("corruption", "Corruption of calibration images and its severity, or `none`."),
        _score_column("kl", "Divergence of class probabilities from the expert's, diagnosis samples.", unit="nat"),
    ),
    "driftlens sweep RUN --param alpha=0,0.1,0.3,1",
)

RESOURCES = TableSchema(
    "resources",
    ("phase",),
    (
        _text_column("phase", "Phase of the work."),
        ColumnSchema("seconds", "float", "s", "Wall-clock time.", None, NOT_NEGATIVE),
        _count_column("peak_rss_bytes", "B", "Peak resident memory of the process, until the end of the phase."),
        _count_column("peak_gpu_bytes", "B", "Peak accelerator memory during the phase."),
        ColumnSchema("energy_wh", "float", "Wh", "Energy used, if measurable.", None, NOT_NEGATIVE),
    ),
)

TABLES = {
    table.name: table
    for table in (
        *(LAYERS, SAMPLES, OUTPUTS, ADJOINT, ROUTING, PARAMS),
        *(ACCURACY, SCORES, CALIBRATION, SWEEPS, RESOURCES),
    )
}


def refuse_newer_schema(version: str, path: pathlib.Path, *, minor: bool = False) -> None:
    """Raise a `SchemaTooNewError` if a file of this schema version ("major.minor") cannot be read.

    Args:
        version: the file's schema version.
        path: the file, for the message.
        minor: refuse a newer minor version too, as before writing, which would lose its unknown columns.
    """
    ours = _parse_version(SCHEMA_VERSION)
    try:
        theirs = _parse_version(version)
    except ValueError:
        raise RunError(f"{path} states the schema version {version!r}; expected one like {SCHEMA_VERSION!r}") from None
    if theirs[0] > ours[0] or (minor and theirs > ours):
        raise SchemaTooNewError(
            f"{path} has schema {version}; this DriftLens knows {SCHEMA_VERSION}",
            hint="Install a newer DriftLens: pip install --upgrade driftlens",
        )


def _parse_version(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
