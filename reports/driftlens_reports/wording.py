"""Numbers in words: the same digits in the terminal and on the page, none that was not measured."""

from __future__ import annotations

from driftlens_reports.facts import NOT_MEASURED, Origins, SelfCheck, is_measured


def number(value: float) -> str:
    """Four significant digits."""
    return f"{value:#.4g}".removesuffix(".") if is_measured(value) else NOT_MEASURED


def error(value: float) -> str:
    """Two significant digits with an exponent, for errors that should be tiny."""
    return f"{value:.1e}" if is_measured(value) else NOT_MEASURED


def percent(value: float) -> str:
    """A fraction as a percentage with one decimal."""
    # Adding zero takes the sign off a zero that was rounded from below.
    return f"{round(100 * value, 1) + 0.0:.1f} %" if is_measured(value) else NOT_MEASURED


def points(value: float) -> str:
    """A change of a fraction in percentage points, signed; empty where it was not measured."""
    return f"{round(100 * value, 1) + 0.0:+.1f}" if is_measured(value) else ""


def points_interval(low: float, high: float) -> str:
    """Both ends of an interval in percentage points; empty where it was not measured."""
    return f"{points(low)} to {points(high)}" if is_measured(low) else ""


def percent_interval(low: float, high: float) -> str:
    """Both ends of an interval of a relative change, in percent; empty where it was not measured."""
    return f"{points_interval(low, high)} %" if is_measured(low) else ""


def share_interval(low: float, high: float) -> str:
    """Both ends of an interval of a fraction in percent; empty where it was not measured."""
    return f"{100 * low:.1f} to {100 * high:.1f}" if is_measured(low) and is_measured(high) else ""


def with_error(value: float, error: float) -> str:
    """Four significant digits, and two of half the interval where there is one."""
    return f"{number(value)} +- {error:#.2g}".removesuffix(".") if is_measured(error) else number(value)


def origin_sentence(origins: Origins) -> str:
    """Which layers the final drift comes from, or that this was not measured."""
    if not origins.layers:
        return f"{origins.task}: {NOT_MEASURED}"
    is_share = origins.measure == "share"
    what = "largest shares of the final drift" if is_share else "largest local mismatch (mean L2)"
    layers = [
        f"layer {entry.layer} ({entry.path}) {(percent if is_share else number)(entry.amount)}"
        for entry in origins.layers
    ]
    return f"{origins.task}: {what}: {', '.join(layers)}"


def check_sentence(check: SelfCheck) -> str:
    """How large one self-check's error gets, and where."""
    if not is_measured(check.largest):
        return f"{check.name} ({check.claim}): {NOT_MEASURED}"
    verdict = "holds" if check.holds else f"DOES NOT HOLD (limit {error(check.limit)})"
    return f"{check.name} ({check.claim}): {verdict}, error at most {error(check.largest)} ({check.where})"


def size(num_bytes: int) -> str:
    """A file size in MB, with one decimal."""
    return f"{num_bytes / 1e6:,.1f} MB"
