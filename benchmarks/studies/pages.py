"""Write the pages of studies in docs: `python -m benchmarks.studies.pages [KEPT ...]`.

KEPT are folders of finished studies. Their results and pictures are copied into `benchmarks/studies/results` and
`docs/assets/studies`, from which all pages are written.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from PIL import Image

from benchmarks.studies.packages import ABOUT_TASKS, TEXTS, download_command
from benchmarks.studies.study import MERGES, MODELS, PICTURES, REPAIRS, RESULTS, Study
from driftlens.results.formatting import Kind, format_estimate, format_percent
from driftlens.utils.errors import join_names
from driftlens.utils.intervals import Interval
from driftlens.utils.variants import METRICS, calibrated_variant

STORED = pathlib.Path(__file__).with_name("results")
DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
NAMES = ("mpnet", "minilm", "gemma", "smollm")
TITLES = {
    "base": "base",
    "expert": "experts",
    "merged": "merged",
    "calibrated:featcal": "FeatCal",
    "calibrated:residual": "residual calibration",
    "calibrated:auto": "`--auto`",
    "average": "average",
    "task_arithmetic": "Task Arithmetic",
    "tsv_m": "TSV-M",
}
SCALING = f"Task Arithmetic with a scaling of {MERGES['task_arithmetic']['scaling']}"
STARTS = {"base": "the base", "merged": "the merge", "average": "the average"}
CALIBRATED = tuple(map(calibrated_variant, REPAIRS))
CAPTIONS = {
    "decomposition": "Drift of {shown} by layer: local mismatch and propagation, merged and repaired",
    "contributions": "Sources: the layers that the final drift of {shown} comes from",
    "scatter-grid": "Samples moving: final features of merged and repaired model, next to the experts'",
    "intro": "Features, drift by layer, and scores of all tasks with 95 % intervals",
}
LEARNED = (
    "`views` of residual calibration, `mu=0.9` with three views of each text: for embedding models, found on MiniLM "
    "and checked on MPNet, and for LoRA experts of decoders, found on the first draw of Gemma 3 270M (+2.8, +1.2 to "
    "+4.3) and checked on SmolLM2.",
    "`embeddings` of FeatCal, `rho=3.0` and `alpha=0.5`: for embedding models, found on MiniLM and checked on MPNet.",
)
"""Presets that studies led to."""
SHOWN = 0.0005
"""Half of the last digit of a share: an interval that ends nearer to 0 is written as one that ends there."""
Results = Mapping[str, Any]


def main(words: Sequence[str] | None = None) -> None:
    """Copy results of finished studies and write the pages of all stored ones."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.pages", description=__doc__)
    parser.add_argument("kept", nargs="*", type=pathlib.Path, help="folders of finished studies")
    for folder in parser.parse_args(words).kept:
        copy_results(folder)
    stored = read_stored()
    for name, results in stored.items():
        study = importlib.import_module(f"benchmarks.studies.{name}").STUDY
        (DOCS / f"study-{name}.md").write_text(study_page(study, results), encoding="utf-8")
    (DOCS / "studies.md").write_text(overview(stored), encoding="utf-8")


def read_stored() -> dict[str, Results]:
    """Return the stored results by study."""
    files = {name: STORED / f"{name}.json" for name in NAMES}
    return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.exists()}


def copy_results(folder: pathlib.Path) -> None:
    """Copy the results of a finished study, and its pictures as WebP."""
    file = folder / RESULTS
    if not file.exists():
        raise SystemExit(f"{folder} has no {RESULTS}; run the study to its end first")
    name = json.loads(file.read_text(encoding="utf-8"))["name"]
    STORED.mkdir(exist_ok=True)
    shutil.copyfile(file, STORED / f"{name}.json")
    pictures = DOCS / "assets" / "studies"
    pictures.mkdir(parents=True, exist_ok=True)
    for picture in PICTURES:
        with Image.open(folder / f"{picture}.png") as image:
            image.convert("RGB").save(pictures / f"{name}-{picture}.webp", quality=80)


def study_page(study: Study, results: Results) -> str:
    """Return the page of a study.

    Args:
        study: the study.
        results: its results.
    """
    sections = (introduction, scores_section, drift_section, checks_section, repeat_section)
    return "\n".join(line for section in sections for line in section(study, results))


def introduction(study: Study, results: Results) -> Iterator[str]:
    """Yield the title, the unclear repairs, the main scores, and what base, experts and texts are."""
    shown = {model: format_percent(row["score"][0]) for model, row in rows_of(results, "average").items()}
    metric, _, _ = measures_of(study)
    calibrated = ", ".join(f"{TITLES[model]} {shown[model]}" for model in CALIBRATED)
    yield f"# {study.title}\n"
    yield from unclear_lines([results])
    yield (
        f"The average of four experts has {shown['merged']} {metric}, the base {shown['base']}, the experts "
        f"{shown['expert']}. Repaired from {results['samples']} unlabelled texts per task: {calibrated}. "
        "[All studies](studies.md).\n"
    )
    yield f"{study.about} {study.experts.format(steps=results['steps'])}\n"
    tasks = join_names(f"`{task}`" for task in study.tasks)
    yield f"The [tasks](studies.md#tasks) are {tasks}, with {results['tests']} test texts each.\n"


def scores_section(study: Study, results: Results) -> Iterator[str]:
    """Yield the tables of scores, and what `--auto` chose."""
    number, average = len(study.tasks), rows_of(results, "average")
    metric, second, _ = measures_of(study)
    yield "## Scores\n"
    yield (
        f"Means over {number} tasks, {number * results['tests']} test texts and {results['draws']} draws of "
        "calibration texts, with 95 % intervals over test texts; `--auto` is of the first draw. Gains are paired by "
        "text, in percentage points. Drift is the relative drift of the final feature.\n"
    )
    yield f"| average of experts | {metric} | over the base | over the merge | {second} | over the merge | drift |"
    yield "|---|---|---|---|---|---|---|"
    yield from (score_row(study, average[model]) for model in MODELS)
    yield f"\n| {metric} by task | {' | '.join(TITLES[model] for model in MODELS)} |"
    yield f"|---{'|---' * len(MODELS)}|"
    for task in study.tasks:
        by_model = (format_percent(average[model]["by_task"][task]["score"]) for model in MODELS)
        yield f"| `{task}` | {' | '.join(by_model)} |"
    yield f"\n{picture(study, results, 'intro')}\n"
    yield f"Other merges, of one draw ({SCALING}):\n"
    yield f"| merge | model | {metric} | against the base | against the merge | against the average |"
    yield "|---|---|---|---|---|---|"
    yield from other_rows(results)
    yield f"\n`--auto` chose {chosen_text(results)}.\n"


def drift_section(study: Study, results: Results) -> Iterator[str]:
    """Yield the layers where drift starts, with pictures."""
    yield "## Where drift starts\n"
    yield f"{sources_sentence(results)}\n"
    yield from (f"{picture(study, results, name)}\n" for name in PICTURES[:-1])


def checks_section(study: Study, results: Results) -> Iterator[str]:
    """Yield what other libraries and a second run confirm, the cost, and what `driftlens why` reports."""
    yield "## Checks and cost\n"
    yield library_sentence(study, results)
    yield from repeated_lines(results)
    yield f"\n{cost_sentence(results)} `driftlens why` on base and experts reports:\n"
    yield f"```text\n{results['checklist'].rstrip()}\n```\n"


def repeat_section(study: Study, results: Results) -> Iterator[str]:
    """Yield the commands that run the study again."""
    libraries = join_names(f"`{name}`" for name in study.libraries)
    yield "## Repeat it\n"
    yield "```bash"
    yield download_command(pathlib.Path("packages"), [*study.packages, TEXTS])
    yield f"python -m benchmarks.studies.{study.name} --folder kept --packages packages"
    yield "```\n"
    yield (
        f"The second command runs in a checkout of DriftLens with {libraries} installed. Seeds are 0 to "
        f"{len(study.tasks) - 1} for the experts, 0 to {results['draws'] - 1} for the draws and 0 for the split of the "
        "texts. After a kill, the same command continues where the study was.\n"
    )


def short_title(results: Results) -> str:
    """Return the name of a study's base."""
    return str(results["title"].partition(":")[0])


def rows_of(results: Results, merge: str) -> dict[str, Results]:
    """Return the rows of a merge by model."""
    return {row["model"]: row for row in results["models"] if row["merge"] == merge}


def repairs_of(results: Results, merge: str) -> list[str]:
    """Return the repaired models that were measured for a merge."""
    rows = rows_of(results, merge)
    return [model for model in CALIBRATED if model in rows]


def merges_of(results: Results) -> list[str]:
    """Return the merges of a study, the average first."""
    return list(dict.fromkeys(row["merge"] for row in results["models"]))


def measures_of(study: Study) -> tuple[str, str, Kind]:
    """Return the titles of both measures, and the format of the second."""
    if study.second == "perplexity":  # scores of single texts are its logarithms
        return METRICS[study.metric].title, "negative log-likelihood, nat", "number"
    return METRICS[study.metric].title, METRICS[study.second].title, "share"


def score_row(study: Study, row: Results) -> str:
    """Return the row of a model in the first table."""
    kind = measures_of(study)[2]
    cells = [TITLES[row["model"]], format_estimate(Interval(*row["score"]), "share")]
    cells += [gain(row, start) if row["model"] != start else "–" for start in ("base", "merged")]
    cells.append(format_estimate(Interval(*row["second"]), kind))
    change = format_estimate(Interval(*row["second against merged"]), "points" if kind == "share" else "signed")
    cells += [change if row["model"] != "merged" else "–", f"{row['drift']:.3f}"]
    return f"| {' | '.join(cells)} |"


def gain(row: Results, start: str) -> str:
    """Return the gain of a model over another, in points with its interval."""
    return format_estimate(Interval(*row[f"score against {start}"]), "points")


def other_rows(results: Results) -> Iterator[str]:
    """Yield the rows of the second table."""
    for merge in merges_of(results)[1:]:
        rows = rows_of(results, merge)
        for model in ("merged", *repairs_of(results, merge)):
            gains = [gain(rows[model], start) if model != start else "–" for start in STARTS]
            score = format_estimate(Interval(*rows[model]["score"]), "share")
            yield f"| {' | '.join([TITLES[merge], TITLES[model], score, *gains])} |"


def unclear_gains(results: Results, model: str, merge: str) -> list[str]:
    """Return what a repaired merge is not clearly better than: the 95 % interval of the gain reaches 0."""
    row = rows_of(results, merge)[model]
    starts = [start for start in STARTS if not (merge == start == "average")]
    return [f"{STARTS[start]}: {gain(row, start)}" for start in starts if not row[f"score against {start}"][1] > SHOWN]


def unclear_lines(studies: Sequence[Results]) -> Iterator[str]:
    """Yield what begins a page: the repairs that are not clearly better than base, merge and average, or worse."""
    rows = []
    for results in studies:
        of_study = [short_title(results)] if len(studies) > 1 else []
        for merge in merges_of(results):
            for model in repairs_of(results, merge):
                of_repair = [*of_study, TITLES[merge], TITLES[model]]
                if unclear := unclear_gains(results, model, merge):
                    rows.append([*of_repair, f"no clear gain over {join_names(unclear)}"])
                if merge == "average" and (worse := worse_tasks(results, model)):
                    rows.append([*of_repair, f"clear loss on {worse}"])
    if not rows:
        yield "All repairs of all merges are clearly better than base, merge and average.\n"
        return
    head = [*(["study"] if len(studies) > 1 else []), "merge", "repair", "gain in points (95 % interval)"]
    yield "Not all repairs are clearly better:\n"
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


def worse_tasks(results: Results, model: str) -> str:
    """Return the tasks on which a repaired average is clearly worse than the average, with the change."""
    changes = {task: of["against merged"] for task, of in rows_of(results, "average")[model]["by_task"].items()}
    return join_names(
        f"`{task}`: {format_estimate(Interval(*ends), 'points')}" for task, ends in changes.items() if ends[2] < 0
    )


def picture(study: Study, results: Results, name: str) -> str:
    """Return the line that shows a picture of a study."""
    return f"![{CAPTIONS[name].format(shown=results['shown'])}](assets/studies/{study.name}-{name}.webp)"


def sources_sentence(results: Results) -> str:
    """Return the layers with the largest shares of the merged model's final drift."""
    shares = [f"{name} {format_estimate(Interval(*ends), 'share')}" for name, ends in results["sources"].items()]
    return (
        "In the first draw, the largest shares of the average's final drift (means over tasks) are those of "
        f"{join_names(shares[:3])}."
    )


def chosen_text(results: Results) -> str:
    """Return what `--auto` chose for which merges."""
    merges: dict[str, list[str]] = {}
    for merge, title in results["chosen"].items():
        merges.setdefault(title, []).append(STARTS.get(merge, TITLES[merge]))
    return "; ".join(f"{title} for {join_names(names)}" for title, names in merges.items())


def library_sentence(study: Study, results: Results) -> str:
    """Return how far the scores of saved models, computed by the base's own library, differ."""
    gaps = [100 * abs(ours - theirs) for ours, theirs in results["library"].values()]
    return (
        f"The merged model and residual calibration of the first draw were saved and scored again by "
        f"{study.libraries[0]} alone: {len(gaps)} scores differ by {max(gaps):.2f} points at most."
    )


def repeated_lines(results: Results) -> Iterator[str]:
    """Yield how far one draw, run again from the training of the experts on, differs."""
    if gaps := results.get("repeated"):
        parts = [
            f"{name} {f'differ by {gap:.1g} at most' if gap else 'are equal'}"
            for name, gap in (("scores of all texts", gaps["score"]), ("drifts", gaps["drift"]))
        ]
        yield f"Experts and the last draw were made again in another folder: {join_names(parts)}."


def cost_sentence(results: Results) -> str:
    """Return machine, versions and CPU time."""
    minutes = {step: seconds / 60 for step, seconds in results["seconds"].items()}
    parts = ", ".join(f"{TITLES.get(calibrated_variant(step), step)} {spent:.0f}" for step, spent in minutes.items())
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    runs = results["draws"] + len(merges_of(results)) - 1
    names = join_names(TITLES.get(calibrated_variant(step), step) for step in results["interrupted"])
    lost = f" The study was interrupted; what {names} had spent until then is not counted." if names else ""
    return (
        f"On {results['machine']}, {versions}, {results['date']}, the study took {sum(minutes.values()):.0f} minutes "
        f"of CPU time: {parts}, summed over {runs} merges and draws with scoring (`--auto`: {len(results['chosen'])})."
        f"{lost}"
    )


def overview(stored: Mapping[str, Results]) -> str:
    """Return the page on all studies: the unclear repairs, how many are clear, and a table of scores."""
    lines = [
        "# Studies on pretrained models",
        "",
        "Each study takes a pretrained base from a package registry, trains four experts on public texts, merges them "
        f"in three ways (average, {SCALING}, TSV-M) and repairs each merge from 64 unlabelled texts per task. A repair "
        "is clearly better if the 95 % interval of its gain, paired by test text, is above 0 against the base, against "
        "the merge that it repairs, and against the average of the experts.",
        "",
        *unclear_lines([*stored.values()]),
        *count_lines(stored),
        "",
        "Scores are means over tasks: of the average over five draws of calibration texts, of other merges and of "
        "`--auto` over one (a dash: not run). Bold ones are clearly better than all three.",
        "",
        f"| study | merge | {' | '.join(TITLES[model] for model in MODELS)} |",
        f"|---|---{'|---' * len(MODELS)}|",
        *(line for name, results in stored.items() for line in overview_rows(name, results)),
        "",
        "## Tasks",
        "",
        f"Texts are those of the package `{TEXTS}` (Hutto and Gilbert 2014). Within a task, calibration, training and "
        "test share no text.",
        "",
        *(f"- `{task}`: {about}" for task, about in ABOUT_TASKS.items()),
        "",
        "The experts are not published: the commands on each study's page train them again, with stated seeds.",
        "",
        *learned_lines(stored),
    ]
    return "\n".join(lines) + "\n"


def count_lines(stored: Mapping[str, Results]) -> Iterator[str]:
    """Yield a sentence on the number of studies in which repairs of the average are clearly better."""
    counts = [
        f"{TITLES[model]} {sum(not unclear_gains(results, model, 'average') for results in stored.values())}"
        for model in CALIBRATED
    ]
    yield (
        f"Studies in which the repaired average is clearly better than base and merge, of {len(stored)}: "
        f"{join_names(counts)}."
    )


def learned_lines(stored: Mapping[str, Results]) -> Iterator[str]:
    """Yield a table of settings by study, and the presets that follow from it."""
    compared = {name: results["settings"] for name, results in stored.items() if "settings" in results}
    if not compared:
        return
    yield "## What was learned"
    yield ""
    yield (
        "Gains of settings over the defaults, in percentage points of the main score of the first draw's average (a "
        "dash: not run). A setting becomes a preset if it is clearly better on one study and not clearly worse on "
        "another:"
    )
    yield ""
    yield from (f"- {preset}" for preset in LEARNED)
    yield ""
    yield f"| setting | {' | '.join(short_title(stored[name]) for name in compared)} |"
    yield f"|---{'|---' * len(compared)}|"
    for setting in dict.fromkeys(setting for of_study in compared.values() for setting in of_study):
        gains = (of_study.get(setting) for of_study in compared.values())
        cells = ("–" if ends is None else format_estimate(Interval(*ends), "points") for ends in gains)
        yield f"| {setting} | {' | '.join(cells)} |"
    yield ""
    yield "`python -m benchmarks.studies.settings NAME kept` measures them in the folder of a study."


def overview_rows(name: str, results: Results) -> Iterator[str]:
    """Yield a row per merge of a study."""
    for merge in merges_of(results):
        cells = []
        rows = rows_of(results, merge)
        for model in MODELS:
            is_clear = model in repairs_of(results, merge) and not unclear_gains(results, model, merge)
            shown = format_percent(rows[model]["score"][0]) if model in rows else "–"
            shown = shown.replace(" ", "\N{NO-BREAK SPACE}")
            cells.append(f"**{shown}**" if is_clear else shown)
        study = f"[{short_title(results)}](study-{name}.md)"
        yield f"| {study} | {TITLES[merge]} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
