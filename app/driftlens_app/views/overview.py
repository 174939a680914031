"""Overview: how far the run's models are from their experts, where that comes from, and what the run is."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from driftlens.records.run import DriftRun
from driftlens.variants import title
from driftlens_app.cards import Card, cards, shown_variant
from driftlens_app.pages import Page, path_of
from driftlens_app.selection import Selection, selection
from driftlens_app.show import page_title, show_chart
from driftlens_app.texts import plain, when
from driftlens_app.trouble import shown_errors
from driftlens_reports import facts
from driftlens_reports.wording import check_sentence, error, origin_sentence, size

PAGE = Page("Overview", icon=":material/dashboard:", order=10, section="Analysis")


def show() -> None:
    """Draw the page."""
    chosen = selection()
    page_title(plain(chosen.run.name), f"{plain(chosen.run.id)} · {when(chosen.run.manifest.created)}")
    for stamp in facts.stamps(chosen.run):
        st.warning(plain(stamp), icon=":material/warning:")
    with shown_errors():
        _cards(chosen)
    show_chart("layer-drift", chosen.run, chosen.options())
    show_chart("heatmap", chosen.run, chosen.options())
    with shown_errors():
        _origins(chosen)
    with shown_errors():
        _self_checks(chosen.run)
    _provenance(chosen.run)


def _cards(chosen: Selection) -> None:
    run = chosen.run
    variant = shown_variant(run, chosen.variants)
    if variant is None:
        reason = "The run has no merged model to look at yet."
        if shown_variant(run, ()) is not None:
            reason = "The base has no cards: they are of merged and calibrated models. Choose one of those variants."
        st.info(reason, icon=":material/info:")
        return
    found = cards(run, variant, chosen.tasks, relative=chosen.relative)
    over = "all tasks" if chosen.task is None else chosen.task
    st.subheader(f"Final feature: {plain(title(variant))}, {plain(over)}", anchor=False)
    for place, card in zip(st.columns(len(found) + 1), [*found, None], strict=True):
        with place:
            if card is None:
                _closure(run)
            else:
                _draw_card(card)
    if not any(name.startswith("calibrated:") for name in run.variants):
        st.page_link(
            path_of("calibrate"), label="Not calibrated yet: calibrate this run", icon=":material/tune:"
        )


def _draw_card(card: Card) -> None:
    with st.container(border=True, height="stretch"):
        st.metric(
            card.label,
            card.value,
            card.change or None,
            delta_color="inverse" if card.lower_is_better else "normal",
            help=card.help,
        )
        if card.worst:
            st.caption(plain(card.worst))


def _closure(run: DriftRun) -> None:
    check = facts.self_checks(run)[0]
    with st.container(border=True, height="stretch"):
        st.metric("Closure error", error(check.largest), help=f"Self-check: {check.claim}.")
        verdict = "not checked" if not facts.is_measured(check.largest) else None
        st.caption(verdict or ("holds" if check.holds else f"does not hold: above {error(check.limit)}"))


def _origins(chosen: Selection) -> None:
    st.subheader(
        "Where the final drift comes from",
        anchor=False,
        help="The three layers with the largest share of each task's final drift, by attribution.",
    )
    found = [entry for entry in facts.origins(chosen.run) if entry.task in chosen.tasks]
    if not any(entry.layers for entry in found):
        st.info("Neither shares nor local mismatch were measured in this run.", icon=":material/info:")
        return
    st.markdown("\n".join(f"- {plain(origin_sentence(entry))}" for entry in found))


def _self_checks(run: DriftRun) -> None:
    st.subheader("Self-checks", anchor=False, help="Claims that are exact in theory, tested on this run.")
    for check in facts.self_checks(run):
        icon = "remove" if not facts.is_measured(check.largest) else "check" if check.holds else "warning"
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
