"""Overview: how far the run's models are from their experts, where that comes from, and what the run is."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from driftlens.records.checks import self_checks
from driftlens.records.reading import is_measured, size
from driftlens.records.run import DriftRun
from driftlens.records.verdict import shareable, task_sheet, verdict
from driftlens_app.live import offer_attribution
from driftlens_app.pages import Page, path_of
from driftlens_app.selection import Selection, selection
from driftlens_app.show import note, page_title, plain, show_chart, show_sheet, shown_errors, when
from driftlens_reports import facts
from driftlens_reports.charts.chart import by_rank, charts
from driftlens_reports.facts import check_sentence, origin_sentence

PAGE = Page("Overview", icon=":material/dashboard:", order=20)
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
        st.markdown("\n\n".join(plain(shareable(run, text)) for text in found.sentences))
        # The least that answers "what to do": the page it leads to has the default in place.
        if st.button("Repair", type="primary", icon=":material/build:", key="to-repair"):
            st.switch_page(path_of("repair"))
    if found.means:
        show_sheet(task_sheet(run, found))


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
    results = self_checks(run).results
    bad = sum(is_measured(check.value) and check.status != "pass" for check in results)
    says, badge = (f"{bad} of the self-checks fail", "warning") if bad else ("Self-checks hold", "verified")
    if not any(is_measured(check.value) for check in results):
        says, badge = "Self-checks were not measured", "remove"
    with st.expander(says, icon=f":material/{badge}:"):
        st.caption("Claims that are exact in theory, tested on this run.")
        for check in results:
            icon = (
                "remove" if not is_measured(check.value) else "check" if check.status == "pass" else "warning"
            )
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
