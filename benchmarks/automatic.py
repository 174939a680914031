"""The automatic choice compared with every candidate, by test scores that no choice reads.

`python -m benchmarks.automatic --suites real --draws 0 1` adds missing draws to a folder, one file per suite and draw,
and prints a table per suite. Every candidate is made from all samples of the draw, with the interpolation factor that
the choice found for it. Seconds are CPU time of choosing and of calibrating alone.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.figures import record
from benchmarks.repairs import (
    DRAWS,
    METRICS,
    NAMES,
    PRESETS,
    SAMPLES,
    CpuClock,
    measured_values,
    paired_change,
    spec_of,
)

AUTO = "--auto"
Draw = Mapping[str, Any]


def run(
    device: str,
    suites: Sequence[str] = tuple(PRESETS),
    draws: Sequence[int] = range(DRAWS),
    folder: str = "automatic",
    choice_only: bool = False,
) -> None:
    """Print a table per suite of the draws that the folder has, after adding the missing ones; record the scores."""
    place = pathlib.Path(folder)
    place.mkdir(exist_ok=True)
    for suite in suites:
        for draw in draws:
            file = place / f"{suite}-{draw}.json"
            if not file.exists():
                file.write_text(json.dumps(drawn(suite, draw, device, choice_only)))
        found = [json.loads(file.read_text()) for file in sorted(place.glob(f"{suite}-*.json"))]
        print(table(suite, found))
        merges = [name for name in found[0]["models"] if name.startswith("merge ")]
        for name in ("base", "merged", *merges, AUTO, "expert"):
            if any(name not in draw["models"] for draw in found):
                continue
            means = [
                100 * float(np.mean([np.mean(of["score"]) for of in draw["models"][name].values()])) for draw in found
            ]
            value = f"{np.mean(means):.1f} % ({min(means):.1f} to {max(means):.1f} over {len(means)} draws)"
            record("automatic", f"{NAMES[suite]}: {name}", value, device=device)
        ratios = [sum(of) / of[1] for draw in found if (of := draw["seconds"][AUTO])[1]]
        if ratios:
            cost = f"{np.mean(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f} over {len(ratios)} draws)"
            figure = f"{NAMES[suite]}: CPU time of choosing and fitting, against fitting alone"
            record("automatic", figure, cost, "at most 2 times", device=device)


def drawn(suite: str, seed: int, device: str, choice_only: bool = False) -> Draw:
    """The choice's record for one draw of samples; test scores and seconds of what it chose and of all candidates.

    With `choice_only`, of candidates only other merges are measured, which cost little.
    """
    import driftlens as dl
    from driftlens.config.requests import CalibrationRequest
    from driftlens.pipelines import model_selection
    from driftlens.pipelines.calibrate import calibrate
    from driftlens.utils.distributed import JobContext

    models, seconds, metric = {}, {}, METRICS[suite]
    with tempfile.TemporaryDirectory() as place:
        spec = spec_of(suite, seed, device, pathlib.Path(place))
        made = dl.analyze(spec, out=f"{place}/run", progress="none")

        def measure(title: str, variant: str) -> None:
            models[title] = {task: measured_values(made, variant, task, metric) for task in spec["experts"]}

        for title in ("base", "merged", "expert"):
            measure(title, title)
        clocks = {phase: CpuClock(phase) for phase in ("choose", "calibrate")}

        def both(event: Any) -> None:
            for clock in clocks.values():
                clock(event)

        made = dl.calibrate(
            made,
            name="auto",
            preset=PRESETS[suite],
            auto=True,
            attribution=False,
            progress="none",
            on_progress=both,
        )
        selection = dict(made.manifest.calibrations["auto"].selection)
        measure(AUTO, "calibrated:auto")
        seconds[AUTO] = [clock.seconds for clock in clocks.values()]
        for number, entry in enumerate(selection["compared"]):
            if "share" not in entry:  # the models as they are, and what could not be made
                continue
            if choice_only and not entry["name"].startswith("merge "):
                continue
            clock = CpuClock("calibrate")
            request = CalibrationRequest(name=f"c{number}", auto=True, attribution=False)
            with mock.patch.object(model_selection, "choose_calibrator", _fixed(entry)):
                made = calibrate(made.path, request, JobContext(on_progress=clock))
            measure(entry["name"], f"calibrated:c{number}")
            seconds[entry["name"]] = [clock.seconds]
        notices = list(made.manifest.calibrations["auto"].notices)
    return {"models": models, "seconds": seconds, "selection": selection, "notices": notices}


def _fixed(entry: Mapping[str, Any]) -> Any:
    """A choice that has made up its mind for one candidate of another's record."""
    from driftlens.calibration.calibrator import calibrators
    from driftlens.config.data import Views
    from driftlens.merging.method import merge_by_name
    from driftlens.utils.registry import resolve_settings

    share, name = entry["share"], entry["name"]
    untold = dict.fromkeys([f"{of}{end}" for of in ("score", "drift") for end in ("", "_low", "_high")])
    found: dict[str, Any] = {"share": share, "curve": [{"share": share, "what": "KL", "n": 0, **untold}]}
    kind = calibrators[entry.get("method", "featcal")]
    made = kind(**resolve_settings(kind, entry.get("settings", {}), "candidate"))
    if name.startswith("merge "):
        found |= {"kept": "merge", "merge": merge_by_name(name.removeprefix("merge ")).record}
    elif "settings" not in entry:
        found["kept"] = "merged"
    elif "views=" in name:
        found["views"] = Views(copies=int(name.split("views=")[1])).model_dump()
    return lambda *_, **__: (made, found)


def table(suite: str, found: Sequence[Draw]) -> str:
    """Means over tasks and draws of test scores and KL; how far the choice is ahead, paired by test sample (95 %)."""
    if not found:
        return f"{suite}: not on this machine"
    every = [draw["models"] for draw in found]
    tasks = list(every[0]["merged"])
    n = sum(len(every[0]["merged"][task]["score"]) for task in tasks)
    lines = [
        f"{suite}: {len(tasks)} tasks, {SAMPLES} samples a task, {len(found)} draws, n = {n} test samples, "
        f"score {METRICS[suite]}",
        f"| | score, % | by draw | {AUTO} ahead by, points | KL, nat | KL of {AUTO} minus it | held-out score | "
        "share | processor seconds |",
        "|---" * 9 + "|",
    ]
    for name in every[0]:
        if any(name not in models for models in every):
            continue
        score, kl = (
            [np.mean([np.mean(models[name][task][column]) for task in tasks]) for models in every]
            for column in ("score", "kl")
        )
        ahead = [paired_change(every, name, AUTO, column) for column in ("score", "kl")]
        entries = [_entry(draw, name) for draw in found]
        shares = [f"{entry['share']:g}" for entry in entries if "share" in entry]
        held = [f"{entry['score']:.3f}" for entry in entries if entry.get("score") is not None]
        seconds = [sum(draw["seconds"][name]) for draw in found if name in draw["seconds"]]
        cells = [
            entries[0].get("title", name),
            f"{100 * np.mean(score):.1f}",
            ", ".join(f"{100 * at:.1f}" for at in score),
            "{:+.1f} ({:+.1f} to {:+.1f})".format(*(100 * x for x in _ends(ahead[0]))),
            f"{np.mean(kl):.3f}",
            "{:+.3f} ({:+.3f} to {:+.3f})".format(*_ends(ahead[1])),
            *(", ".join(held), ", ".join(shares), f"{np.mean(seconds):.0f}" if seconds else ""),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    for draw in found:
        chosen, (choosing, fitting) = draw["selection"]["choice"], draw["seconds"][AUTO]
        lines.append(f"chose {chosen}: {choosing:.0f} s of choosing and {fitting:.0f} s of calibrating")
    return "\n".join(lines)


def _entry(draw: Draw, name: str) -> Mapping[str, Any]:
    return next((entry for entry in draw["selection"]["compared"] if entry["name"] == name), {})


def _ends(change: Any) -> tuple[float, float, float]:
    return change.value, change.low, change.high


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suites", nargs="*", default=tuple(PRESETS))
    parser.add_argument("--draws", nargs="*", type=int, default=range(DRAWS))
    parser.add_argument("--folder", default="automatic", help="where what was measured is kept")
    parser.add_argument("--choice-only", action="store_true", help="measure no candidates but merges")
    run("cpu", **vars(parser.parse_args()))
