"""Commands that only read: show, ls, doctor, check, compare, ui, report, export, view."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from driftlens.cli.app import JsonFlag, RunFolder, app, flagged, manner, note, say, say_json
from driftlens.config.requests import ExportRequest, ViewRequest, parts
from driftlens.utils.errors import ChecksFailedError, DataError, RunError, SpecError

if TYPE_CHECKING:
    from driftlens.calibration.calibrator import Calibrator
    from driftlens.runs.run import DriftRun
    from driftlens_reports.paper.exhibit import Exported

_PACKAGES = (
    *("torch", "torchvision", "open_clip_torch", "transformers", "safetensors"),
    *("pandas", "pyarrow", "streamlit"),
)


def show_run(run: DriftRun, *, as_json: bool = False, everyone: bool = False) -> None:
    """Print a run's summary, with all models side by side if `everyone` is wanted, or its final rows as JSON."""
    from driftlens.results.measures import findings
    from driftlens.results.verdict import verdict
    from driftlens_reports.facts import advice
    from driftlens_reports.terminal import summary

    if as_json:
        say_json(
            {
                "id": run.id,
                "name": run.name,
                "path": run.path,
                "synthetic": run.manifest.synthetic,
                "tasks": run.tasks,
                "variants": run.variants,
                "verdict": verdict(run),
                "findings": findings(run),
                "final": run.layers(layer="final"),
                "accuracy": run.accuracy(),
                "advice": advice(run) if "merged" in run.variants else None,
                "warnings": run.manifest.warnings,
                "notices": run.manifest.notices,
            }
        )
        return
    say(summary(run, verbose=manner.verbose, everyone=everyone))


@app.command()
def show(run: RunFolder, as_json: JsonFlag = False) -> None:
    """Tell what a run found: drift, where it comes from, accuracy, self-checks."""
    from driftlens.runs.run import open_run

    show_run(open_run(run), as_json=as_json)


@app.command("ls")
def list_runs(
    root: Annotated[Path, typer.Argument(help="The folder to look in.")] = Path(), as_json: JsonFlag = False
) -> None:
    """List the runs below a folder."""
    from driftlens.results.listing import find_runs
    from driftlens_reports.terminal import listing_text

    found = find_runs(root)
    if as_json:
        say_json(found)
    else:
        say(listing_text(found) if found else f"no runs below {root}; `driftlens demo` makes one")


@app.command()
def doctor(
    methods: Annotated[
        bool, typer.Option("--methods", help="List calibrators and merge methods with settings and presets.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Report the environment (versions, devices, cache, what is missing) or, with --methods, the methods there are."""
    if methods:
        say_json(_catalog()) if as_json else say(_catalog_text(_catalog()))
        return
    found = environment()
    if as_json:
        say_json(found)
    else:
        width = max(map(len, found))
        say("\n".join(f"{name:<{width}}  {value}" for name, value in found.items()))


_VIEWS = re.compile(r"\b\d+ views\b")


def _catalog() -> dict[str, dict[str, Any]]:
    """Calibrators, merge methods and loaders by name, each with title, source and settings.

    Of calibrators also the presets, which settings can be chosen by themselves, what `--auto` compares, and the fewest
    samples of a task that the choice of the best method is made on; 0 where nothing is chosen. The dashboard, which
    never imports torch, asks for it by `driftlens doctor --methods --json`.
    """
    from driftlens.calibration.automatic import NUM_FOLDS
    from driftlens.calibration.calibrator import calibrators
    from driftlens.merging.method import READS, merge_methods
    from driftlens.models.architecture import loaders
    from driftlens.utils.registry import schemas_of, settings_of

    return {
        "calibrators": {
            name: {
                "title": kind.title or name,
                "source": kind.source,
                "kind": "closed form" if kind.takes_sites else "trained",
                "needs_task_id": not kind.takes_sites,
                "effort": kind.effort,
                "settings": schemas_of(settings_of(kind)),
                "presets": {preset: dict(values) for preset, values in kind.presets.items()},
                "suited": dict(kind.suited),
                "automatic": _varied(kind),
                "swept": {setting: [*factors] for setting, factors in kind.swept.items()},
                "of_base": [*kind.of_base],
                "candidates": _compared(kind),
                "fewest": 2 * NUM_FOLDS if kind.candidates else 0,
            }
            # Those with published settings first.
            for name, kind in sorted(calibrators.items(), key=lambda entry: not entry[1].presets)
        },
        "merge_methods": {
            name: {
                "title": method.title,
                "source": method.source,
                "reads": READS[method.reads],
                "settings": schemas_of(settings_of(method.function)),
            }
            for name, method in merge_methods.items()
        },
        "loaders": {
            name: {"title": (loader.__doc__ or name).partition("\n")[0], "source": "", "settings": {}}
            for name, loader in loaders.items()
        },
    }


def _varied(kind: type[Calibrator]) -> list[str]:
    """List the settings in which candidates differ, in the order of the constructor."""
    from driftlens.utils.registry import settings_of

    return [
        name
        for name in settings_of(kind).model_fields
        if any(name in settings for settings in kind.candidates)
    ]


def _compared(kind: type[Calibrator]) -> dict[str, list[str]]:
    """Return preset -> titles of the candidates that `--auto` compares; the number of views depends on the samples."""
    from driftlens.pipelines.model_selection import titles

    presets = kind.presets if kind.candidates else {}
    return {
        name: [_VIEWS.sub("views", title) for title in titles(kind(**values))]
        for name, values in presets.items()
    }


def _catalog_text(found: dict[str, dict[str, Any]]) -> str:
    """Format the catalogue for a terminal: a paragraph per method, a line per setting."""
    from driftlens.utils.registry import expected

    lines = []
    for kind, methods in found.items():
        lines.append(kind.replace("_", " ").capitalize())
        for name, method in methods.items():
            source = f", {method['source']}" if method["source"] else ""
            reads = f"; reads {method['reads']}" if "reads" in method else ""
            reads += ", requires the task of each input" if method.get("needs_task_id") else ""
            lines.append(f"  {name}: {method['title']}{source}{reads}")
            for setting, schema in method["settings"].items():
                default = f"default {_setting(schema['default'])}" if "default" in schema else "required"
                unit = f" {schema['unit']}" if schema["unit"] and "default" in schema else ""
                lines.append(
                    f"    {setting}  {schema.get('description') or expected(schema)} ({default}{unit})"
                )
            for preset, values in method.get("presets", {}).items():
                given = ", ".join(f"{key} {_setting(value)}" for key, value in values.items())
                lines.append(f"    preset {preset}: {given}")
    return "\n".join(lines)


def _setting(value: object) -> str:
    if value is None:
        return "none"
    return "+".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def environment() -> dict[str, str]:
    """Describe the machine for a bug report, one line each, with anything that does not work."""
    import psutil

    import driftlens
    from driftlens.runs.manifest import version_of
    from driftlens.utils.devices import accelerator, device_name
    from driftlens.utils.devices import memory as memory_of

    memory, gpu = psutil.virtual_memory(), "none (CPU only)"
    if (device := accelerator()) is not None:
        known = memory_of(device)
        gpu = ", ".join([device_name(device), *([f"{known[1] / 2**30:.0f} GiB"] if known else [])])
    clip = "imports"
    try:
        importlib.import_module("transformers.models.clip.modeling_clip")
    except Exception as error:
        # The usual cause is a torchvision that was built for another torch.
        clip = f"broken: {type(error).__name__}: {error}; install torch and torchvision together"
    return {
        "driftlens": driftlens.__version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        **{name: version_of(name) or "not installed" for name in _PACKAGES},
        "cpu": f"{os.cpu_count()} cores",
        "memory": f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB free",
        "gpu": gpu,
        "offline": "yes (HF_HUB_OFFLINE)" if os.environ.get("HF_HUB_OFFLINE") else "no",
        "transformers with torchvision": clip,
        "plugins": "; ".join(_plugins()) or "none",
    }


def _plugins() -> Iterator[str]:
    """Yield the plug-ins of installed distributions, and why any of them can't be loaded."""
    from driftlens.calibration.calibrator import calibrators
    from driftlens.data.sources import data_sources
    from driftlens.merging.method import merge_methods
    from driftlens.models.architecture import loaders
    from driftlens.models.chain import adapters
    from driftlens.utils.diagnostic import diagnostics
    from driftlens.utils.registry import Registry, installed, origin
    from driftlens_reports.charts.chart import charts

    registries: tuple[Registry[Any], ...] = (
        *(loaders, adapters, merge_methods, data_sources),
        *(calibrators, diagnostics, charts),
    )
    readers = {registry.group: registry for registry in registries}
    offered = installed()
    for entry in offered:
        reader = readers.get(entry.group)
        what = (
            f"{reader.kind} {entry.name}" if reader is not None else f"{entry.name} in {entry.group}, unknown"
        )
        yield f"{' '.join(origin(entry))}: {what}"
    for group in sorted(readers.keys() & {entry.group for entry in offered}):
        try:
            len(readers[group])
        except SpecError as error:
            yield f"broken: {error.message}"


@app.command()
def check(
    run: RunFolder,
    tests: Annotated[
        Path | None,
        typer.Option(
            "--tests", metavar="FILE", help="YAML file of checks; the built-in self-checks if left out."
        ),
    ] = None,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Also write the results as JUnit XML.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check a run's numbers against bounds and its files against their digests; exit code 3 if one fails.

    What was not measured is skipped.
    """
    from driftlens.results.checks import check as judge
    from driftlens.results.checks import junit_xml
    from driftlens.runs.run import left_undone
    from driftlens.runs.verify import verify
    from driftlens.utils.files import write_text_atomic
    from driftlens_reports.terminal import checks_text, verification_text

    files, report = verify(run), judge(run, tests)
    if junit is not None:
        write_text_atomic(junit, junit_xml(report))
    if as_json:
        document = {
            "run": report.run.id,
            "ok": not report.failed and files.ok,
            "files": {"ok": files.ok, **vars(files)},
            "executed": report.executed,
            **{status: report.count(status) for status in ("pass", "warn", "fail", "skip")},
            "results": report.results,
        }
        say_json(document)
    else:
        say(f"{verification_text(files)}\n{checks_text(report)}")
        for text in left_undone(report.run) if files.unlisted else ():
            note(text)  # which job the unlisted files belong to
    if not files.ok:
        raise typer.Exit(RunError.exit_code)
    if report.failed:
        raise typer.Exit(ChecksFailedError.exit_code)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="The run before.")],
    second: Annotated[
        Path | None,
        typer.Argument(metavar="[B]", help="The run after; left out, two variants of A are compared."),
    ] = None,
    before: Annotated[
        str | None, typer.Option(help="Variant of A; merged, or with B every variant both have.")
    ] = None,
    after: Annotated[
        str | None, typer.Option(help="Variant of B; like --before, or without B the calibration added last.")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Demand equal numbers within this relative tolerance; exit code 3 if not."
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show what changes between two runs or two variants: drift, flips, accuracy with intervals."""
    from driftlens.results.compare import compare as compared
    from driftlens.results.compare import mean_score_change
    from driftlens.runs.verify import TOLERANCE, equality
    from driftlens.utils.intervals import p_of
    from driftlens_reports.terminal import comparison_text

    found = compared(first, second, before=before, after=after)
    if second is None and tolerance is not None:
        raise typer.BadParameter("--tolerance compares two runs; give the second one")
    limit = TOLERANCE if tolerance is None else tolerance
    equal = None if second is None else equality(found.before, found.after)
    if as_json:
        same = None if equal is None else {**vars(equal), "tolerance": limit, "within": equal.within(limit)}
        by_pair = found.tasks.groupby(["before", "after"], sort=False)
        means = [(pair, mean_score_change(rows)) for pair, rows in by_pair]
        document = {
            "before": {"id": found.before.id, "name": found.before.name},
            "after": {"id": found.after.id, "name": found.after.name},
            **{name: getattr(found, name) for name in ("pairs", "mismatches", "notes", "tasks", "layers")},
            "means": [{"pair": pair, **vars(at), "p_value": p_of(at)} for pair, at in means],
            "equality": same,
        }
        say_json(document)
    else:
        say(comparison_text(found, equal, limit))
    if tolerance is not None and equal is not None and not equal.within(limit):
        raise typer.Exit(ChecksFailedError.exit_code)


@app.command()
def ui(
    root: Annotated[
        Path, typer.Argument(metavar="[RUN or FOLDER]", help="A run, or a folder of runs.", show_default=".")
    ] = Path(),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port to listen on; the first free one from 8501 if left out."),
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only start the server.")] = False,
    read_only: Annotated[bool, typer.Option("--read-only", help="Look only: start no jobs.")] = False,
    allow_remote_jobs: Annotated[
        bool,
        typer.Option(
            "--allow-remote-jobs",
            allow_from_autoenv=False,
            help="With another --host: anyone who reaches it may start jobs.",
        ),
    ] = False,
) -> None:
    """Open the dashboard on a run or a folder of runs, for this machine only."""
    from driftlens_app.settings import Settings, is_local, server_command, server_environment

    if not root.is_dir():
        raise RunError(
            f"{root} is not a folder", hint="Give a run, or a folder of runs; `driftlens demo` makes one."
        )
    is_remote = not is_local(host)
    if is_remote:
        note(
            f"warning: the dashboard has no login; anyone who reaches {host} sees every run in {root.resolve()}"
        )
    if is_remote and not allow_remote_jobs:
        note("jobs can't be started from other machines (--allow-remote-jobs lets them)")
        read_only = True
    settings = Settings(root=root.resolve(), read_only=read_only)
    arguments = server_command(host=host, port=port, browser=not no_browser)
    sys.stdout.flush()
    # The server takes this process's place: signals reach it, and its exit code is the command's.
    os.execve(arguments[0], arguments, server_environment(settings))


@app.command()
def report(
    run: RunFolder,
    formats: Annotated[
        str,
        typer.Option("--format", help="html, html-light, json, md, csv, latex; several joined by commas."),
    ] = "html",
    out: Annotated[
        Path | None, typer.Option(help="Folder for the files; the run's own `reports` if left out.")
    ] = None,
    sections: Annotated[
        str,
        typer.Option(
            help="summary, standard, calibration or full (single samples, too); or sections joined by commas, such as "
            "layers,checks."
        ),
    ] = "standard",
    checks: Annotated[
        Path | None, typer.Option("--checks", metavar="FILE", help="YAML file of checks to show results of.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a drift report: what a run found, in sentences, tables and charts made from its numbers."""
    from driftlens_reports.build import Report
    from driftlens_reports.sections import PRESETS

    chosen = parts(sections)
    is_preset = len(chosen) == 1 and chosen[0] in PRESETS
    made = Report(
        run,
        chosen[0] if is_preset else "standard",
        sections=None if is_preset else chosen,
        checks=checks,
    )
    paths = made.attach(parts(formats)) if out is None else made.save(out, parts(formats))
    if as_json:
        say_json(paths)
        return
    for path in _beginnings(paths):
        say(f"wrote {path}")


def _beginnings(paths: list[Path]) -> list[str]:
    """Return a line per file, but one per folder of many files."""
    folders = dict.fromkeys(path.parent for path in paths if path.parent.name in ("csv", "latex"))
    files = [str(path) for path in paths if path.parent not in folders]
    counts = [(folder, sum(path.parent == folder for path in paths)) for folder in folders]
    return [*files, *(f"{count} files in {folder}" for folder, count in counts)]


@app.command()
@flagged
def export(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    request: ExportRequest,
    as_json: JsonFlag = False,
) -> None:
    """Write figures and tables for a paper, with their numbers, provenance and a caption draft."""
    from driftlens.runs.run import open_run
    from driftlens_reports.card import save_card
    from driftlens_reports.paper.exhibit import ExhibitOptions
    from driftlens_reports.paper.exhibit import export as write

    names = [*request.figures, *request.tables]
    if request.card:
        for run in runs:
            place = request.out / ("card.png" if len(runs) == 1 else f"{run.resolve().name}/card.png")
            note(f"wrote {save_card(run, place)}")
        if not names:
            return
    written = write(
        [open_run(run) for run in runs],
        request.out,
        names=names or None,
        formats=parts(request.formats),
        options=ExhibitOptions.of(request),
    )
    _tell(written, runs, request.out, as_json)
    if request.strict and any(entry.missing and entry.files for entry in written):
        raise typer.Exit(DataError.exit_code)


def _tell(written: Sequence[Exported], runs: Sequence[Path], out: Path, as_json: bool) -> None:
    """Print what was written to stdout and what is missing to stderr, with commands to copy where there is one run."""
    if as_json:
        say_json(
            [
                {
                    "exhibit": entry.name,
                    "files": entry.files,
                    "missing": [{"name": part.name, "missing": part.missing} for part in entry.missing],
                }
                for entry in written
            ]
        )
        return
    run = shlex.quote(str(runs[0])) if len(runs) == 1 else "RUN"
    for entry in written:
        if entry.files:
            say(f"{entry.name}: {' '.join(path.suffix.removeprefix('.') for path in entry.files)}")
        for part in entry.missing:
            what = f"  {entry.name} lacks {part.name}" if entry.files else f"{entry.name} is not written"
            missing = re.sub(r"\bRUN\b", lambda _: run, part.missing)
            note(f"{what}: {missing}")
    say(f"{sum(len(entry.files) for entry in written)} files in {out}")


@app.command()
@flagged
def view(run: RunFolder, request: ViewRequest) -> None:
    """Write a page to explore samples in: they move from model to model; select, filter, search, export. No server."""
    from driftlens_reports.explorer import Explorer

    say(f"wrote {Explorer(run, request).save(request.out)}")
