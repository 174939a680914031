r"""The repair that a run used as an algorithm box, with its settings: LaTeX (`algorithmic`) and a still picture."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib import rcParams

from driftlens.base.variants import calibrated, calibration_of
from driftlens.runs.manifest import CalibrationInfo
from driftlens.runs.run import DriftRun
from driftlens.runs.schema import CALIBRATE
from driftlens_reports.charts.words import between
from driftlens_reports.paper.exhibit import Exhibited, ExhibitOptions, figure, origin
from driftlens_reports.paper.figures import Plate
from driftlens_reports.paper.grid import escape
from driftlens_reports.paper.marks import GUIDE
from driftlens_reports.paper.published import method_title
from driftlens_reports.paper.style import venue_of

Step = tuple[int, str]
"""How deep a line stands, and the line: words with formulas between dollars that TeX and matplotlib both set."""

_FORMULA = re.compile(r"(\$[^$]*\$)")
_LINE, _LETTERS = 1.55, 0.47
"""Height of a line and width of a letter, in parts of the size of the type."""


def featcal(settings: Mapping[str, Any]) -> Iterator[Step]:
    """FeatCal in forward order (arXiv:2605.13030), as `driftlens.calibration.featcal` computes it."""
    updates = settings.get("update", ("linear", "bias", "norm"))
    yield 0, r"$M^c \leftarrow M^m$"
    yield 0, "for each layer in forward order"
    yield 1, r"collect the inputs $X_i^c$ of $M^c$ and $X_i^e$ of expert $i$, for all of its modules at once"
    if "linear" in updates:
        yield 1, "for each linear module"
        yield (
            2,
            r"$X_i^t \leftarrow \alpha X_i^e + (1-\alpha) X_i^c, \quad W^a \leftarrow W^b + \rho (W^m - W^b)$",
        )
        yield (
            2,
            r"$G_i \leftarrow X_i^c X_i^{c\top} / n, \quad C_i \leftarrow X_i^t X_i^{c\top} / n, \quad "
            r"\omega_i \leftarrow 1 / \max(\Vert G_i \Vert_F, \epsilon)$",
        )
        yield (
            2,
            r"$W \leftarrow (\sum_i \omega_i W_i C_i + \lambda W^a)\,(\sum_i \omega_i G_i + \lambda I)^{-1}$",
        )
    if "bias" in updates:
        yield 1, "solve the biases of these modules in closed form"
    if "norm" in updates:
        yield 1, "solve gain and shift of each norm in closed form, on the normalised features of $M^c$"
    yield 1, "put what was solved into $M^c$"


def residual(settings: Mapping[str, Any]) -> Iterator[Step]:
    """Residual calibration, as `driftlens.calibration.residual` computes it."""
    is_stepwise = settings.get("order") != "block"
    depth = 2 if is_stepwise else 1
    yield 0, r"$M^c \leftarrow M^m$"
    if settings.get("weights") != "uniform":
        yield 0, "weigh every token by random backward passes of its expert"
    yield 0, "for each block in forward order"
    if is_stepwise:
        yield 1, "for each step of the block (queries, keys, values; output; each half of the MLP)"
    streams = r"outputs $y_i$ and streams $s_i^e$"
    yield depth, rf"collect the inputs $x_i^c$ of $M^c$, and what expert $i$ gives: {streams}"
    yield depth, "for each linear module"
    adds = r"$t_i \leftarrow y_i + \beta\,(s_i^e - s_i^c)$ where it adds to a stream of features"
    yield depth + 1, rf"{adds}, else $t_i \leftarrow y_i$"
    if settings.get("cv") != "off":
        yield depth + 1, r"choose $\beta$ and the ridge by cross-validation over samples"
    yield (
        depth + 1,
        r"$W \leftarrow$ the ridge solution of $W x_i^c \approx t_i$ over all tasks, from $W^m$ on",
    )
    yield depth, "put what was solved into $M^c$"


METHODS = {"featcal": featcal, "residual": residual}

_SYMBOLS = {"lam": r"$\lambda$", "alpha": r"$\alpha$", "rho": r"$\rho$", "eps": r"$\epsilon$", "mu": r"$\mu$"}
_ABOUT = {
    "featcal": ("lam", "alpha", "rho", "eps"),
    "residual": ("order", "residual", "weights", "cv", "folds", "ridge", "mu"),
}


@figure("algorithm", title="Algorithm of the repair", latex=True)
def algorithm(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
    """The calibration shown, line by line, with the settings and the samples that it had in the run.

    The last one that is written here; where one is asked for, that one alone.
    """
    run = runs[0]
    every = run.variants if options.calibrated is None else options.calibrated_of(run)
    calibrations = run.manifest.calibrations
    asked = (calibration_of(variant) for variant in every)
    names = [name for name in asked if name is not None and name in calibrations]
    name = next((name for name in reversed(names) if calibrations[name].method in METHODS), "")
    info = calibrations.get(name)
    if info is None:
        plate = Plate(options.width, 0.25 * options.width, "algorithm")
        what = "written for FeatCal and residual calibration" if names else f"`{CALIBRATE}` adds one"
        plate.note(plate.figure.subplots(), "the algorithm of the repair", what)
        return plate.exhibited(["The repair, line by line.", *origin([run])])
    title = f"{method_title(info.method)} calibration".replace("calibration calibration", "calibration")
    steps = [*METHODS[info.method](info.settings)]
    head = [*_head(info, len(run.manifest.layers))]
    plate = Plate(options.width, 0.0, "algorithm")
    _draw(plate, title, head, steps)
    for task, count in info.samples.items():
        plate.record("a", run, "calibration samples", count, task=task, variant=calibrated(name))
    shown = plate.exhibited([f"{title}, as the run used it.", *origin([run])])
    return Exhibited(shown.data, shown.caption, figure=shown.figure, latex=_latex(title, head, steps))


def _head(info: CalibrationInfo, layers: int) -> Iterator[tuple[str, str]]:
    counts = [*info.samples.values()]
    tasks = f"{len(counts)} task{'' if len(counts) == 1 else 's'}"
    drawn = "" if info.seed is None else f", seed {info.seed}"
    models = f"base $M^b$, merged model $M^m$, experts $M_i^e$ of {tasks}"
    yield "Require", f"{models}, n = {between(counts)} unlabelled samples each{drawn}"
    idle = "ridge" if info.settings.get("cv") == "on" else "folds"
    settings = {
        name: info.settings[name] for name in _ABOUT[info.method] if name in info.settings and name != idle
    }
    parts = (
        f"{_SYMBOLS.get(name, name)} = {value:g}" if isinstance(value, (int, float)) else f"{name} = {value}"
        for name, value in settings.items()
    )
    where = f"{len(info.layers)} of {layers} layers"
    chosen = ", chosen on held-out calibration samples" if info.automatic else ""
    yield "Require", f"{', '.join(parts)}{chosen}; {where}"
    yield "Ensure", "calibrated model $M^c$ of the same architecture"


def _draw(plate: Plate, title: str, head: Sequence[tuple[str, str]], steps: Sequence[Step]) -> None:
    """One text a line, numbered as LaTeX numbers them; what is too long for its line goes on in the next."""
    size = rcParams["font.size"]
    width = plate.figure.get_figwidth() * 72
    lines: list[tuple[float, str, str]] = []
    for word, text in head:
        parts = _wrapped(f"{word}: {text}", width / size / _LETTERS)
        lines += [(0.0, "", part) for part in parts]
    for number, (depth, text) in enumerate(steps, start=1):
        room = width / size / _LETTERS - 3 * depth - 4
        text = f"{text} do" if text.startswith("for ") else text
        for index, part in enumerate(_wrapped(text, room)):
            lines.append((1.5 * depth + 1.9 + index, "" if index else f"{number}:", part))
    height = (len(lines) + 2.4) * _LINE * size
    if venue_of(width / 72) == "slide":  # which has a form of its own
        height = max(height, plate.figure.get_figheight() * 72)
    plate.figure.set_size_inches(plate.figure.get_figwidth(), height / 72)
    axes = plate.figure.subplots()
    axes.set_axis_off()
    axes.set(xlim=(0, width / size), ylim=(height / size, 0))
    rule: dict[str, Any] = {"color": rcParams["text.color"], "clip_on": False, "marker": "", "label": GUIDE}
    for y, thick in ((0.1, 1.4), (1.2 * _LINE, 0.7), ((len(lines) + 1.5) * _LINE, 1.4)):
        axes.plot([0, width / size], [y, y], linewidth=thick * rcParams["axes.linewidth"], **rule)
    style: dict[str, Any] = {"va": "center", "parse_math": True, "in_layout": False}
    axes.text(0, 0.65 * _LINE, f"Algorithm: {title}", fontweight="bold", **style)
    for place, (indent, number, text) in enumerate(lines):
        y = (place + 1.8) * _LINE
        axes.text(1.2, y, number, ha="right", fontsize=max(7.0, 0.83 * size), **style)
        axes.text(indent, y, text, **style)


def _wrapped(text: str, room: float) -> list[str]:
    """Lines of at most about so many letters, broken between words and never inside a formula."""
    words = [
        part for piece in _FORMULA.split(text) for part in ([piece] if piece[:1] == "$" else piece.split(" "))
    ]
    lines, used = [""], 0.0
    for word in words:
        # A command is one sign; marks of TeX take no room.
        letters = len(re.sub(r"[\\${}^_]|\\[a-zA-Z]+", "", re.sub(r"\\[a-zA-Z]+", "x", word)))
        if used + letters > room and lines[-1]:
            lines, used = [*lines, ""], 0.0
        joint = " " if lines[-1] and word and not re.match(r"[,;:.]", word) else ""
        lines[-1] += joint + word
        used += letters + len(joint)
    return [line for line in lines if line]


def _latex(title: str, head: Sequence[tuple[str, str]], steps: Sequence[Step]) -> str:
    """The box for the packages algorithm and algpseudocode."""
    lines = ["% Needs \\usepackage{algorithm,algpseudocode}.", "\\begin{algorithm}[t]"]
    lines += [f"\\caption{{{escape(title)}}}", "\\label{alg:drift-repair}", "\\begin{algorithmic}[1]"]
    lines += [f"\\{word} {_prose(text)}" for word, text in head]
    open_loops: list[int] = []
    for depth, text in [*steps, (0, "")]:
        while open_loops and depth <= open_loops[-1]:
            lines.append(f"{'  ' * open_loops.pop()}\\EndFor")
        if text.startswith("for "):
            open_loops.append(depth)
            lines.append(f"{'  ' * depth}\\For{{{_prose(text.removeprefix('for '))}}}")
        elif text:
            lines.append(f"{'  ' * depth}\\State {_prose(text)}")
    return "\n".join([*lines, "\\State \\Return $M^c$", "\\end{algorithmic}", "\\end{algorithm}", ""])


def _prose(text: str) -> str:
    return "".join(part if part[:1] == "$" else escape(part) for part in _FORMULA.split(text))
