"""The figures that are made of charts alone."""

from __future__ import annotations

from driftlens_reports.paper.charted import View, chart_figure

# Numbers of charts, by what the run's tables call them.
DRIFT = {"mean drift": "drift_l2_mean", "10 % quantile": "drift_l2_q10", "90 % quantile": "drift_l2_q90"}
SPLIT = {"mismatch": "mismatch_l2_mean", "propagation": "propagation_l2_mean", "cross term": "cross_term"}
GROWTH = {
    **{"amplification": "amplification", "Jacobian error": "jacobian_error"},
    **{"random gain": "random_gain_mean"},
}
SHARES = {"carried share": "final_share", "swapped share": "prefix_share"}
DECISIONS = {name: f"share {name}" for name in ("certified", "kept without certificate", "flipped")}
SAMPLES = {"cosine": "cos", "baseline cosine": "cos of the baseline", "mean gain": "mean gain of cos"}
GAINS = {"cosine gain": "gain of cos_mean", "accuracy gain (points)": "gain of accuracy, points"}
ACCURACY = {"accuracy": "accuracy", "low": "ci_low", "high": "ci_high"}

chart_figure(
    "heatmap",
    title="Relative drift by task and layer",
    lead="Drift against the expert's feature norm, by task and layer, ratios of sums over samples.",
    rows=[[View("heatmap", {"relative drift": "drift_rel"}, options={"relative": True})]],
)
chart_figure(
    "amplification",
    title="Growth of incoming drift by layer",
    lead="Above 1 a layer lets drift grow; the stem has no incoming drift.",
    rows=[[View("amplification", GROWTH, is_about_one=True)]],
)
chart_figure(
    "decomposition",
    title="Local mismatch and propagation by layer",
    lead="Drift by layer, split exactly into e = m + p; norms alone do not add up.",
    rows=[
        [View("layer-drift", DRIFT, is_about_one=True)],
        [View("decomposition", SPLIT, is_about_one=True)],
    ],
)
chart_figure(
    "contributions",
    title="Layers that the final drift comes from",
    lead="Signed shares of the final drift by the layer whose local mismatch they come from; they sum to 1.",
    rows=[
        [View("contributions", {"share of final drift": "final_share"}, is_about_one=True)],
        [View("splits", SHARES, is_about_one=True)],
    ],
)
chart_figure(
    "output-drift",
    title="Margins, score drift and flipped decisions",
    lead="What drift does to decisions: how many the margins protect, and how many flip.",
    rows=[
        [View("margins", DECISIONS)],
        [View("flips", {"kept": "kept decisions", "flipped": "flipped decisions"}, is_about_one=True)],
    ],
)
chart_figure(
    "diagnostics",
    title="Calibration against a baseline, in features and parameters",
    paper="Figures 2 and 7",
    lead="What calibration changes, compared with a baseline; cosine is a diagnostic, not an explanation of accuracy.",
    rows=[
        [
            View("task-cosine", {"mean cosine": "cos_mean"}),
            View("sample-cosine", SAMPLES, is_about_one=True, is_about_calibrated=True),
        ],
        [
            View("gains", GAINS, is_about_calibrated=True),
            View("backbone-alignment", {"cosine of task vectors": "cos"}),
        ],
    ],
)
