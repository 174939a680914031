"""Overview: how far the run's models are from their experts, where that comes from, and what the run is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import streamlit as st

from driftlens.records.checks import self_checks
from driftlens.records.reading import error, is_measured, number, percent, size
from driftlens.records.run import DriftRun
from driftlens.records.verdict import task_sheet, verdict
from driftlens.variants import part_of, title
from driftlens_app.live import offer_attribution
from driftlens_app.pages import Page, path_of
from driftlens_app.selection import Selection, selection
from driftlens_app.show import note, page_title, plain, show_chart, show_sheet, shown_errors, when
from driftlens_reports import facts
from driftlens_reports.charts.chart import by_rank, charts
from driftlens_reports.facts import check_sentence, origin_sentence

PAGE = Page("Overview", icon=":material/dashboard:", order=10, section="Analysis")
_MOST_STAMPS = 3
"""Warnings that stand above all else; more would push the numbers off the screen."""


def show() -> None:
    """Draw the page."""
    chosen = selection()
    page_title(plain(chosen.run.name), f"{plain(chosen.run.id)} · {when(chosen.run.manifest.created)}")
    stamps = facts.stamps(chosen.run)
    for stamp in stamps[:_MOST_STAMPS]:
        st.warning(plain(stamp), icon=":material/warning:")
    if more := stamps[_MOST_STAMPS:]:
        with st.expander(f"{len(more)} more", icon=":material/warning:"):
            st.markdown("\n".join(f"- {plain(stamp)}" for stamp in more))
    with shown_errors():
        _show_verdict(chosen.run)
    with shown_errors():
        _show_cards(chosen)
    for chart in by_rank(entry for entry in charts.values() if "overview" in entry.presets):
        show_chart(chart.name, chosen.run, chosen.options())
    with shown_errors():
        _origins(chosen)
    with shown_errors():
        _list_self_checks(chosen.run)
    _provenance(chosen.run)


def _show_verdict(run: DriftRun) -> None:
    found = verdict(run)
    with st.container(border=True):
        st.markdown("\n\n".join(map(plain, found.sentences)))
    if found.means:
        show_sheet(task_sheet(run, found))


def _show_cards(chosen: Selection) -> None:
    """Final drift, cosine and changed decisions of one variant, compared with the merged model, and the closure."""
    run = chosen.run
    variant = _shown_variant(run, chosen.variants)
    if variant is None:
        reason = "The run has no merged model to look at yet."
        if _shown_variant(run, ()) is not None:
            reason = "The base has no cards: they are of merged and calibrated models. Choose one of those variants."
        note(reason)
        return
    over = "all tasks" if chosen.task is None else chosen.task
    st.subheader(f"Final feature: {plain(title(variant))}, {plain(over)}", anchor=False)
    before = "merged" if variant != "merged" else ""  # the latter is a column of gaps
    final = run.layers(layer="final") if run.manifest.layers else run.layers()

    def sides(rows: pd.DataFrame, column: str) -> tuple[pd.Series[float], pd.Series[float]]:
        """The column's means by task, now and before."""
        numbers = rows[rows["task"].isin(chosen.tasks)].astype({column: float})
        means = numbers.pivot_table(index="task", columns="variant", values=column)
        means = means.reindex(columns=[variant, before])
        return means[variant], means[before]

    places = st.columns(4)
    _card(
        places[0],
        "Relative final drift" if chosen.relative else "Final drift",
        *sides(final, "drift_rel" if chosen.relative else "drift_l2_mean"),
        words=number,
        help="Mean L2 distance of the final feature to the expert's, over samples, then over tasks."
        + (" In units of the expert's feature norm." if chosen.relative else ""),
    )
    _card(
        places[1],
        "Cosine to expert",
        *sides(final, "cos_mean"),
        words=number,
        lower_is_better=False,
        help="Mean cosine of the final feature to the expert's, over samples, then over tasks.",
    )
    _card(
        places[2],
        "Changed decisions",
        *sides(run.outputs(), "flipped"),
        words=percent,
        difference=lambda share: f"{100 * share:.1f} points",
        help="Share of diagnosis samples whose predicted class differs from the expert's.",
    )
    check = self_checks(run).results[0]
    with places[3].container(border=True, height="stretch"):
        st.metric("Closure error", error(check.value), help=f"Self-check: {check.claim}.")
        verdict = None if is_measured(check.value) else "not checked"
        st.caption(
            verdict
            or ("holds" if check.status == "pass" else f"does not hold: above {error(check.threshold)}")
        )
    if not any(part_of(name) == "calibrated" for name in run.variants):
        st.page_link(
            path_of("calibrate"), label="Not calibrated yet: calibrate this run", icon=":material/tune:"
        )


def _shown_variant(run: DriftRun, asked: Sequence[str]) -> str | None:
    """The variant that the cards show: the newest calibrated one of those asked for, or of all, else the merged model.

    None where the base is all there is, or all that was asked for.
    """
    candidates = [variant for variant in asked or run.variants if variant not in ("base", "expert")]
    calibrated = [variant for variant in candidates if part_of(variant) == "calibrated"]
    if calibrated:
        return calibrated[-1]
    return "merged" if "merged" in candidates else next(iter(candidates), None)


def _card(
    place: Any,
    label: str,
    now: pd.Series[float],
    then: pd.Series[float],
    *,
    words: Callable[[float], str],
    difference: Callable[[float], str] = number,
    help: str,
    lower_is_better: bool = True,
) -> None:
    """The mean over tasks, its change in the card's own unit, and which task is worst."""
    measured = now.dropna()
    mean, before = measured.mean(), then[measured.index].mean(skipna=False)
    # The sign comes first, as Streamlit reads it.
    change = f"{'-' if mean < before else '+'}{difference(abs(mean - before))} against merged"
    with place.container(border=True, height="stretch"):
        st.metric(
            label,
            words(mean),
            change if is_measured(mean) and is_measured(before) else None,
            delta_color="inverse" if lower_is_better else "normal",
            help=help,
        )
        if len(measured) > 1:
            worst = measured.idxmax() if lower_is_better else measured.idxmin()
            st.caption(plain(f"worst: {worst} {words(measured[worst])}"))


def _origins(chosen: Selection) -> None:
    st.subheader(
        "Where the final drift comes from",
        anchor=False,
        help="The three layers with the largest share of each task's final drift, by attribution.",
    )
    offer_attribution(chosen.run)
    found = [entry for entry in facts.origins(chosen.run) if entry.task in chosen.tasks]
    if not any(entry.layers for entry in found):
        note("Neither shares nor local mismatch were measured in this run.")
        return
    st.markdown("\n".join(f"- {plain(origin_sentence(entry))}" for entry in found))


def _list_self_checks(run: DriftRun) -> None:
    st.subheader("Self-checks", anchor=False, help="Claims that are exact in theory, tested on this run.")
    for check in self_checks(run).results:
        icon = "remove" if not is_measured(check.value) else "check" if check.status == "pass" else "warning"
        st.markdown(f":material/{icon}: {plain(check_sentence(check))}")


def _provenance(run: DriftRun) -> None:
    manifest = run.manifest
    with st.expander("Provenance"):
        facts_of_run = {
            "architecture": ", ".join(f"{name} {value}" for name, value in manifest.architecture.items()),
            "device": f"{manifest.device}, {manifest.dtype}",
            "seeds": ", ".join(f"{name} {seed}" for name, seed in manifest.seeds.items()),
            "versions": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
            "platform": ", ".join(f"{name} {value}" for name, value in manifest.platform.items()),
            "spec": manifest.spec_digest,
            "size": size(sum(file.bytes for file in manifest.files.values())),
            **{f"weights of {name}": model.digest for name, model in manifest.models.items()},
        }
        rows = pd.DataFrame(facts_of_run.items(), columns=["what", "value"])
        st.dataframe(rows, hide_index=True, key="provenance", alt="Provenance of the run")
        for notice in manifest.notices:
            st.caption(plain(notice))


if __name__ == "__main__":
    show()
