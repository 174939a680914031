"""Commands that only read: show, ls, doctor, check, compare, ui, report, export, view."""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from driftlens.cli.app import (
    JsonFlag,
    RunFolder,
    app,
    print_json,
    print_note,
    print_result,
    show_run,
    takes_requests,
)
from driftlens.utils.errors import ChecksFailedError, RunError, SpecError

if TYPE_CHECKING:
    from driftlens.config.requests import ExportRequest, ViewRequest
    from driftlens_reports.paper.exhibit import ExportedExhibit

_PACKAGES = (
    *("torch", "torchvision", "open_clip_torch", "transformers", "safetensors"),
    *("pandas", "pyarrow", "streamlit"),
)


@app.command()
def _show(run: RunFolder, as_json: JsonFlag = False) -> None:
    """Show a run's results: drift, its sources, accuracy and self-checks."""
    from driftlens.runs.run import open_run

    show_run(open_run(run), as_json=as_json)


@app.command("ls")
def _list_runs(
    root: Annotated[Path, typer.Argument(help="Folder to search.")] = Path(), as_json: JsonFlag = False
) -> None:
    """List the runs below a folder."""
    from driftlens.results.listing import find_runs
    from driftlens_reports.terminal import run_list_text

    runs = find_runs(root)
    if as_json:
        print_json(runs)
    else:
        print_result(run_list_text(runs) if runs else f"no runs below {root}; `driftlens demo` makes one")


@app.command()
def _doctor(
    methods: Annotated[
        bool, typer.Option("--methods", help="List calibrators and merge methods with settings.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Report the environment (versions, devices, problems) or, with --methods, all methods."""
    if methods:
        print_json(_method_catalog()) if as_json else print_result(_format_method_catalog(_method_catalog()))
        return
    facts = environment_report()
    if as_json:
        print_json(facts)
    else:
        width = max(map(len, facts))
        print_result("\n".join(f"{name:<{width}}  {value}" for name, value in facts.items()))


def _method_catalog() -> dict[str, dict[str, Any]]:
    """Return all calibrators, merge methods and loaders by name, with title, source and settings.

    The dashboard, which never imports torch, reads this from `driftlens doctor --methods --json`.
    """
    from driftlens.calibration.automatic import NUM_FOLDS
    from driftlens.calibration.calibrator import calibrators
    from driftlens.merging.method import READS, merge_methods
    from driftlens.models.architecture import loaders
    from driftlens.pipelines.model_selection import candidate_titles
    from driftlens.utils.registry import setting_schemas, settings_model

    catalog: dict[str, dict[str, Any]] = {"calibrators": {}, "merge_methods": {}, "loaders": {}}
    # Those with presets first.
    for name, kind in sorted(calibrators.items(), key=lambda entry: not entry[1].presets):
        settings = setting_schemas(settings_model(kind))
        compared = kind.presets if kind.candidates else {}
        catalog["calibrators"][name] = {
            **{"title": kind.title or name, "source": kind.source, "effort": kind.effort, "settings": settings},
            "kind": "closed form" if kind.takes_sites else "trained",
            "needs_task_id": not kind.takes_sites,
            "presets": {
                preset: {**values, **({"views": kind.preset_views[preset]} if preset in kind.preset_views else {})}
                for preset, values in kind.presets.items()
            },
            "suited": dict(kind.suited),
            # The settings in which candidates differ, in constructor order.
            "automatic": [setting for setting in settings if any(setting in tried for tried in kind.candidates)],
            "swept": {setting: [*factors] for setting, factors in kind.swept.items()},
            "of_base": [*kind.of_base],
            # The number of views depends on the samples, so titles leave it out.
            "candidates": {
                preset: [re.sub(r"\b\d+ views\b", "views", title) for title in candidate_titles(kind(**values))]
                for preset, values in compared.items()
            },
            "fewest": 2 * NUM_FOLDS if kind.candidates else 0,
        }
    for name, method in merge_methods.items():
        about = {"title": method.title, "source": method.source, "reads": READS[method.reads]}
        catalog["merge_methods"][name] = {**about, "settings": setting_schemas(settings_model(method.function))}
    for name, loader in loaders.items():
        title = (loader.__doc__ or name).partition("\n")[0]
        catalog["loaders"][name] = {"title": title, "source": "", "settings": {}}
    return catalog


def _format_method_catalog(catalog: dict[str, dict[str, Any]]) -> str:
    """Format the method catalog as text: a paragraph per method, a line per setting."""
    from driftlens.results.formatting import format_setting
    from driftlens.utils.registry import allowed_values_text

    lines = []
    for kind, methods in catalog.items():
        lines.append(kind.replace("_", " ").capitalize())
        for name, method in methods.items():
            source = f", {method['source']}" if method["source"] else ""
            reads = f"; reads {method['reads']}" if "reads" in method else ""
            reads += "; requires the task ID at inference" if method.get("needs_task_id") else ""
            lines.append(f"  {name}: {method['title']}{source}{reads}")
            for setting, schema in method["settings"].items():
                default = f"default {format_setting(schema['default'])}" if "default" in schema else "required"
                unit = f" {schema['unit']}" if schema["unit"] and "default" in schema else ""
                about = schema.get("description") or allowed_values_text(schema)
                lines.append(f"    {setting}  {about} ({default}{unit})")
            for preset, values in method.get("presets", {}).items():
                settings = ", ".join(f"{key} {format_setting(value)}" for key, value in values.items())
                lines.append(f"    preset {preset}: {settings}")
    return "\n".join(lines)


def environment_report() -> dict[str, str]:
    """Return versions, devices and problems of the environment, for bug reports."""
    import psutil

    import driftlens
    from driftlens.runs.manifest import package_version
    from driftlens.utils.devices import accelerator, device_memory, device_name

    memory, gpu = psutil.virtual_memory(), "none (CPU only)"
    if (device := accelerator()) is not None:
        total = device_memory(device)
        gpu = device_name(device) + (f", {total[1] / 2**30:.0f} GiB" if total else "")
    return {
        "driftlens": driftlens.__version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        **{name: package_version(name) or "not installed" for name in _PACKAGES},
        "cpu": f"{os.cpu_count()} cores",
        "memory": f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB free",
        "gpu": gpu,
        "offline": "yes (HF_HUB_OFFLINE)" if os.environ.get("HF_HUB_OFFLINE") else "no",
        "plugins": "; ".join(_describe_plugins()) or "none",
    }


def _describe_plugins() -> Iterator[str]:
    """Yield a line for each installed plug-in and for each that fails to import."""
    from driftlens.calibration.calibrator import calibrators
    from driftlens.data.sources import data_sources
    from driftlens.merging.method import merge_methods
    from driftlens.models.architecture import loaders
    from driftlens.models.chain import adapters
    from driftlens.utils.registry import Registry, diagnostics, installed_plugins, package_and_version
    from driftlens_reports.charts.chart import charts

    models: tuple[Registry[Any], ...] = (loaders, adapters, merge_methods, data_sources)
    readers = {registry.group: registry for registry in (*models, calibrators, diagnostics, charts)}
    offered = installed_plugins()
    for entry in offered:
        reader = readers.get(entry.group)
        # The truth of a registry would load its plug-ins.
        what = f"{reader.kind} {entry.name}" if reader is not None else f"{entry.name} in {entry.group}, unknown"
        yield f"{' '.join(package_and_version(entry))}: {what}"
    for group in sorted(readers.keys() & {entry.group for entry in offered}):
        try:
            len(readers[group])
        except SpecError as error:
            yield f"broken: {error.message}"


@app.command()
def _check(
    run: RunFolder,
    tests: Annotated[
        Path | None,
        typer.Option("--tests", metavar="FILE", help="YAML file of checks; default: built-in self-checks."),
    ] = None,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Also write the results as JUnit XML.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check a run's numbers against bounds and its files against digests; exit code 3 on failure.

    Checks without measured values are skipped.
    """
    from driftlens.results.checks import check as judge, junit_xml
    from driftlens.runs.run import unfinished_work
    from driftlens.runs.verify import verify_files
    from driftlens.utils.files import write_text_atomic
    from driftlens_reports.terminal import checks_text, verification_text

    files, report = verify_files(run), judge(run, tests)
    if junit is not None:
        write_text_atomic(junit, junit_xml(report))
    if as_json:
        counts = {status: report.count(status) for status in ("pass", "warn", "fail", "skip")}
        about = {"run": report.run.id, "ok": not report.failed and files.ok}
        about |= {"files": {"ok": files.ok, **vars(files)}, "executed": report.executed}
        print_json({**about, **counts, "results": report.results})
    else:
        print_result(f"{verification_text(files)}\n{checks_text(report)}")
        for text in unfinished_work(report.run) if files.unlisted else ():
            # Unlisted files belong to an unfinished job, which this names.
            print_note(text)
    if not files.ok:
        raise typer.Exit(RunError.exit_code)
    if report.failed:
        raise typer.Exit(ChecksFailedError.exit_code)


@app.command()
def _compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="The run before.")],
    second: Annotated[
        Path | None, typer.Argument(metavar="[B]", help="The run after; default: compare variants of A.")
    ] = None,
    before: Annotated[
        str | None, typer.Option(help="Variant of A; default: merged, or with B all shared ones.")
    ] = None,
    after: Annotated[
        str | None, typer.Option(help="Variant of B; default: as --before, or without B the shown calibration.")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0.0, help="Require equal numbers within this relative tolerance; exit code 3 otherwise."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Compare two runs or two variants: drift, flips, accuracy with intervals."""
    from driftlens.results.compare import compare as compared, mean_score_change
    from driftlens.runs.verify import TOLERANCE, compare_tables
    from driftlens.utils.intervals import interval_p_value
    from driftlens_reports.terminal import run_comparison_text

    comparison = compared(first, second, before=before, after=after)
    if second is None and tolerance is not None:
        raise SpecError("--tolerance compares two runs", hint="Give the second one.")
    limit = TOLERANCE if tolerance is None else tolerance
    equal = None if second is None else compare_tables(comparison.before, comparison.after)
    if as_json:
        same = None if equal is None else {**vars(equal), "tolerance": limit, "within": equal.is_within(limit)}
        by_pair = comparison.tasks.groupby(["before", "after"], sort=False)
        means = [(pair, mean_score_change(rows)) for pair, rows in by_pair]
        document = {
            "before": {"id": comparison.before.id, "name": comparison.before.name},
            "after": {"id": comparison.after.id, "name": comparison.after.name},
            **{name: getattr(comparison, name) for name in ("pairs", "mismatches", "notes", "tasks", "layers")},
            "means": [{"pair": pair, **vars(change), "p_value": interval_p_value(change)} for pair, change in means],
            "equality": same,
        }
        print_json(document)
    else:
        print_result(run_comparison_text(comparison, equal, limit))
    if tolerance is not None and equal is not None and not equal.is_within(limit):
        raise typer.Exit(ChecksFailedError.exit_code)


@app.command()
def _ui(
    root: Annotated[
        Path, typer.Argument(metavar="[RUN or FOLDER]", help="A run, or a folder of runs.", show_default=".")
    ] = Path(),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port; default: the first free one from 8501.")
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Do not open a browser.")] = False,
    read_only: Annotated[bool, typer.Option("--read-only", help="Start no jobs.")] = False,
    allow_remote_jobs: Annotated[
        bool,
        typer.Option(
            "--allow-remote-jobs", allow_from_autoenv=False, help="Let visitors from other machines start jobs."
        ),
    ] = False,
) -> None:
    """Open the dashboard on a run or a folder of runs, on this machine only by default."""
    from driftlens_app.settings import Settings, is_local_host, server_command, server_environment

    if not root.is_dir():
        raise RunError(f"{root} is not a folder", hint="Give a run or a folder of runs; `driftlens demo` creates one.")
    root = root.resolve()
    if not is_local_host(host):
        print_note(f"warning: the dashboard has no login; anyone who can reach {host} sees all runs in {root}")
        if not allow_remote_jobs:
            print_note("read-only for remote visitors; --allow-remote-jobs lets them start jobs")
            read_only = True
    settings = Settings(root=root, read_only=read_only)
    arguments = server_command(host=host, port=port, browser=not no_browser)
    sys.stdout.flush()
    # The server replaces this process, so that it receives signals and its exit code is the command's.
    os.execve(arguments[0], arguments, server_environment(settings))


@app.command()
def _report(
    run: RunFolder,
    formats: Annotated[
        str, typer.Option("--format", help="Comma-separated: html, html-light, json, md, csv, latex.")
    ] = "html",
    out: Annotated[Path | None, typer.Option(help="Output folder; default: `reports` in the run.")] = None,
    sections: Annotated[
        str,
        typer.Option(
            help="summary, standard, calibration or full; or comma-separated sections such as layers,checks."
        ),
    ] = "standard",
    checks: Annotated[
        Path | None, typer.Option("--checks", metavar="FILE", help="YAML file of checks to include.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a drift report of a run: text, tables and charts."""
    from driftlens.config.requests import split_names
    from driftlens_reports.build import Report
    from driftlens_reports.sections import PRESETS

    chosen = split_names(sections)
    is_preset = len(chosen) == 1 and chosen[0] in PRESETS
    preset = chosen[0] if is_preset else "standard"
    made = Report(run, preset, sections=None if is_preset else chosen, checks=checks)
    paths = made.save(out, split_names(formats))
    if as_json:
        print_json(paths)
        return
    # Formats of many files have a folder each.
    folders = Counter(path.parent for path in paths if path.parent.name in ("csv", "latex"))
    for path in paths:
        if path.parent not in folders:
            print_result(f"wrote {path}")
    for folder, count in folders.items():
        print_result(f"wrote {count} files in {folder}")


@app.command()
@takes_requests
def _export(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    request: ExportRequest,
    as_json: JsonFlag = False,
) -> None:
    """Write figures and tables for a paper, with numbers, provenance and caption drafts."""
    from driftlens.config.requests import split_names
    from driftlens.runs.run import open_run
    from driftlens_reports.card import save_summary_image
    from driftlens_reports.paper.exhibit import ExhibitOptions, export_exhibits as write

    names = [*request.figures, *request.tables]
    if request.card:
        for run in runs:
            place = request.out / ("card.png" if len(runs) == 1 else f"{run.resolve().name}/card.png")
            print_note(f"wrote {save_summary_image(run, place)}")
        if not names:
            return
    written = write(
        [open_run(run) for run in runs],
        request.out,
        names=names or None,
        formats=split_names(request.formats),
        options=ExhibitOptions.from_request(request),
    )
    _print_export_result(written, runs, request.out, as_json)


def _print_export_result(written: Sequence[ExportedExhibit], runs: Sequence[Path], out: Path, as_json: bool) -> None:
    """Print written files to stdout and missing parts to stderr."""
    if as_json:
        keys = ("exhibit", "files", "missing")
        print_json([dict(zip(keys, (entry.name, entry.files, entry.missing), strict=True)) for entry in written])
        return
    # With a single run, commands in messages can be copied as they are.
    run = shlex.quote(str(runs[0])) if len(runs) == 1 else "RUN"
    for entry in written:
        if entry.files:
            print_result(f"{entry.name}: {' '.join(path.suffix.removeprefix('.') for path in entry.files)}")
        for part in entry.missing:
            what = f"  {entry.name} lacks {part.name}" if entry.files else f"{entry.name} is not written"
            missing = re.sub(r"\bRUN\b", lambda _: run, part.missing)
            print_note(f"{what}: {missing}")
    print_result(f"{sum(len(entry.files) for entry in written)} files in {out}")


@app.command()
@takes_requests
def _view(run: RunFolder, request: ViewRequest) -> None:
    """Write a stand-alone page to explore samples across models: select, filter, search, export."""
    from driftlens_reports.explorer import Explorer

    print_result(f"wrote {Explorer(run, request).save(request.out)}")
