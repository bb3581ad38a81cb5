"""A run as one HTML page that needs nothing else: no network, no scripts, no other file."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from slidedp_jax.planner.hardware import GIB
from slidedp_jax.run.arguments import FIELDS
from slidedp_jax.run.report_charts import Level, Line, line_chart, stacked_chart
from slidedp_jax.run.report_data import RunData, curve, median, shares
from slidedp_jax.run.time_text import clock, duration
from slidedp_jax.wording import short_count

_COLOURS = ("#1a84cc", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9")
"""Told apart by all eyes (Okabe and Ito), dark enough for lines."""

_WAITS = {
    "wait_update_s": "for layers that the host updates",
    "wait_leave_s": "for gradients to leave",
    "data_time_s": "for rows",
    "wait_device_s": "for the devices to finish",
}
_BUSY = {
    "host_update_s": "optimizer on the host",
    "wait_norm_s": "update thread, waiting for gradients",
    "save_s": "writing checkpoints, all threads",
}


_Row = tuple[str, float, float | None, Callable[[float], str]]
"""Name, predicted, measured, and how such a figure is written."""


def report_page(run: RunData) -> str:
    """The text of the page."""
    title = html.escape(run.name)
    sections = [
        _section("Loss", _loss(run)),
        _section("Learning rate", _plain(run, "learning_rate", "rate")),
        _section("Gradient norm", _norm(run)),
        _section("Tokens per second", _speed(run)),
        _section("Memory", _memory(run)),
        _section("What the step's thread waited for", _waits(run), _WAIT_TEXT),
        _section("What was busy beside it", _busy(run), _BUSY_TEXT),
    ]
    tables = [
        _table_section("Predicted and measured", _predicted(run)),
        _bounds(run),
        _samples(run),
        _settings(run),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{_style()}</style></head><body><h1>{title}</h1>{_summary(run)}"
        f"<div class=charts>{''.join(sections)}</div>{''.join(tables)}</body></html>\n"
    )


_WAIT_TEXT = (
    "Share of the time, from the end of one step to that of the next, in which the thread that "
    "issues the steps stood still. While it waits for the devices to finish, they compute; all "
    "else is time that they may lack work."
)
_BUSY_TEXT = (
    "Share of the time, from the end of one step to that of the next. The update of a step runs "
    "beside the next one; near 100 % the optimizer on the host bounds the run. Several threads may "
    "write a checkpoint, which then counts several times."
)


def _section(title: str, chart: str, text: str = "") -> str:
    if not chart:
        return ""
    words = f"<p>{html.escape(text)}</p>" if text else ""
    return f"<section><h2>{html.escape(title)}</h2>{chart}{words}</section>"


def _loss(run: RunData) -> str:
    names = _held_out_losses(run)
    lines = [Line(name="training", bins=curve(run.steps, "loss"), colour=1)]
    lines += [
        Line(
            name=words,
            bins=curve(run.evaluations, name),
            colour=2 + number % (len(_COLOURS) - 1),
            dots=True,
        )
        for number, (name, words) in enumerate(names.items())
    ]
    spikes = [record["step"] for record in run.steps if record.get("spikes")]
    return line_chart(lines, unit="loss", marks=spikes)


def _held_out_losses(run: RunData) -> dict[str, str]:
    """Field of each held-out loss -> what it is called; where all is one named set, only that."""
    fields = dict.fromkeys(name for record in run.evaluations for name in record)
    named = {
        name: f"held out: {match[1]}"
        for name in fields
        if (match := re.fullmatch(r"eval_(.+)_loss", name))
    }
    whole = {"eval_loss": "held out"} if "eval_loss" in fields else {}
    names = [*named]
    one_set = len(names) == 1 and all(
        record["eval_loss"] == record.get(names[0])
        for record in run.evaluations
        if "eval_loss" in record
    )
    return named if one_set else whole | named


def _plain(run: RunData, name: str, unit: str) -> str:
    line = Line(name=name.replace("_", " "), bins=curve(run.steps, name), colour=1)
    return line_chart([line], unit=unit, from_zero=True)


def _norm(run: RunData) -> str:
    limit = run.record["arguments"].get("max_grad_norm")
    levels = [Level(name="clip", value=limit, colour=2)] if limit else []
    line = Line(name="before clipping", bins=curve(run.steps, "grad_norm"), colour=1)
    return line_chart([line], unit="norm", levels=levels, from_zero=True)


def _speed(run: RunData) -> str:
    line = Line(name="without padding", bins=curve(run.steps, "tokens_per_second"), colour=1)
    return line_chart([line], unit="tokens/s", from_zero=True)


def _memory(run: RunData) -> str:
    planned = _planned_bytes(run)
    lines = [
        Line(name="host", bins=curve(run.steps, "host_rss_gib"), colour=1),
        Line(name="device, peak", bins=curve(run.steps, "device_peak_gib"), colour=2),
    ]
    levels = [Level(name="host, planned", value=planned["host"] / GIB, colour=1)]
    if lines[1].bins:
        levels.append(Level(name="device, planned", value=planned["device"] / GIB, colour=2))
    return line_chart(lines, unit="GiB", levels=levels, from_zero=True)


def _waits(run: RunData) -> str:
    if not any("wait_update_s" in record for record in run.steps):
        return ""  # of an earlier version
    lines = [
        Line(name=name, bins=shares(run.steps, field), colour=1 + number)
        for number, (field, name) in enumerate(_WAITS.items())
    ]
    return stacked_chart(lines, unit="% of the time")


def _busy(run: RunData) -> str:
    if not any("host_update_s" in record for record in run.steps):
        return ""
    lines = []
    for number, (field, name) in enumerate(_BUSY.items()):
        bins = shares(run.steps, field)
        if any(bin.mean for bin in bins):
            percent = [
                type(bin)(
                    step=bin.step, mean=100 * bin.mean, low=100 * bin.low, high=100 * bin.high
                )
                for bin in bins
            ]
            lines.append(Line(name=name, bins=percent, colour=1 + number))
    return line_chart(lines, unit="% of the time", from_zero=True, most=120.0)


def _planned_bytes(run: RunData) -> dict[str, float]:
    memory = run.record["plan"]["chosen"]["memory"]
    return {"host": memory["host_bytes"], "device": memory["device_bytes"]}


def _summary(run: RunData) -> str:
    last, model = run.steps[-1], run.record["plan"]["model"]
    parts = [
        str(run.record.get("base_model") or model["name"]),
        f"{short_count(model['num_parameters'])} parameters",
        f"step {last['step']:,}",
        f"{last['num_tokens']:,} tokens",
        f"loss {_figure(last['loss'])}",
    ]
    if run.evaluations and "eval_loss" in run.evaluations[-1]:
        parts.append(f"held out {_figure(run.evaluations[-1]['eval_loss'])}")
    if last.get("eta_s"):
        parts.append(f"{clock(last['eta_s'])} left")
    parts.append(str(last.get("time", ""))[:16].replace("T", " ") + " UTC")
    return f'<p class="summary">{html.escape(" · ".join(parts))}</p>'


def _predicted(run: RunData) -> str:
    steps = run.steps[1:] or run.steps
    chosen, planned = run.record["plan"]["chosen"], _planned_bytes(run)
    predicted_s = (run.record.get("predicted") or {}).get("step_s", chosen["time"]["step_s"])
    measured_s = median([record["step_time_s"] for record in steps])
    rows: list[_Row] = [("step, median after the first", predicted_s, measured_s, duration)]
    peaks = [r["device_peak_gib"] for r in steps if r.get("device_peak_gib") is not None]
    if peaks:
        rows.append(("device memory, peak", planned["device"], max(peaks) * GIB, _gib))
    host = [r["host_rss_gib"] for r in steps if r.get("host_rss_gib") is not None]
    if host:
        rows.append(
            ("host memory, highest at a step's end", planned["host"], max(host) * GIB, _gib)
        )
    body = [
        [name, form(predicted), form(measured), f"{measured / predicted:.2f}"]
        for name, predicted, measured, form in rows
        if measured is not None
    ]
    return _table(["", "predicted", "measured", "measured / predicted"], body)


def _bounds(run: RunData) -> str:
    if not run.profiles:
        return ""
    texts = [
        f"<p><b>{html.escape(name.replace('_', ' '))}</b>: {html.escape(text)}</p>"
        for name, text in run.profiles.items()
    ]
    return f"<section class=wide><h2>What bounds a step</h2>{''.join(texts)}</section>"


def _samples(run: RunData) -> str:
    rows = [
        [f"{sample['step']:,}", *(_shown(str(sample.get(n))) for n in ("prompt", "completion"))]
        for sample in run.samples
    ]
    head = ["step", "prompt", "completion"]
    return _table_section("Samples", _table(head, rows)) if rows else ""


def _shown(text: str) -> str:
    """A sample's text without lines around it; what has no words is quoted, to be seen at all."""
    return text.strip("\n") if text.strip() else json.dumps(text)


def _settings(run: RunData) -> str:
    own = run.record["arguments"]
    changed, usual = list[list[str]](), list[list[str]]()
    for name, value in own.items():
        field = FIELDS.get(name)
        default: Any = None
        if field is not None:
            default = field.default if not callable(field.default_factory) else []
            if callable(field.default_factory):
                default = field.default_factory()
        row = [name, json.dumps(value, default=str)]
        (usual if field is not None and value == default else changed).append(row)
    versions = [[name, str(version)] for name, version in run.record.get("versions", {}).items()]
    strategy = run.record["plan"]["chosen"]["strategy"]
    return "".join(
        [
            _table_section("Settings other than by default", _table(["", ""], changed)),
            _folded("Settings as they are by default", usual),
            _folded("Strategy", [[name, json.dumps(value)] for name, value in strategy.items()]),
            _folded("Versions", versions),
        ]
    )


def _folded(title: str, rows: Sequence[Sequence[str]]) -> str:
    return (
        f"<details><summary>{html.escape(title)}</summary>{_table(['', ''], rows)}</details>"
        if rows
        else ""
    )


def _table_section(title: str, table: str) -> str:
    return f"<section class=wide><h2>{html.escape(title)}</h2>{table}</section>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{html.escape(name)}</th>" for name in head) if any(head) else ""
    body = "".join(
        "<tr>" + "".join(f"<td><div>{html.escape(cell)}</div></td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table>{f'<tr>{top}</tr>' if top else ''}{body}</table>"


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.2f} GiB"


def _style() -> str:
    rules = [
        ":root{color-scheme:light dark;--fg:#1b1b1b;--bg:#fff;--soft:#8888;--line:#ddd}",
        "@media(prefers-color-scheme:dark){:root{--fg:#e8e8e8;--bg:#161618;--line:#3a3a3e}}",
        "body{font:15px/1.45 system-ui,sans-serif;color:var(--fg);background:var(--bg);"
        "max-width:1240px;margin:2rem auto;padding:0 1rem}",
        "h1{font-size:1.5rem;margin:0}h2{font-size:1.05rem;margin:0 0 .4rem}",
        ".summary{color:var(--fg);opacity:.8}",
        ".charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));"
        "gap:1.2rem}",
        "section{border:1px solid var(--line);border-radius:8px;padding:.8rem 1rem}",
        "section p{margin:.4rem 0 0;font-size:.85rem;opacity:.8}",
        ".wide,details{margin-top:1.2rem}details{padding:0 1rem}summary{cursor:pointer}",
        "svg{width:100%;height:auto;display:block}svg text{font-size:11px;fill:var(--fg)}",
        ".axis{stroke:var(--fg);fill:none}.grid{stroke:var(--line)}",
        ".curve{fill:none;stroke-width:1.6}.dashed{stroke-dasharray:6 4}.band{opacity:.18}",
        ".level{stroke-dasharray:5 4;stroke-width:1.4}.mark{fill:#d55e00}",
        ".legend{font-size:.8rem}.legend span{margin-right:1rem;white-space:nowrap}",
        ".legend i{display:inline-block;width:.8em;height:.8em;border-radius:2px;"
        "margin-right:.35em}.legend i.thin{height:.2em;vertical-align:middle}",
        "table{border-collapse:collapse;font-size:.87rem;width:100%}",
        "td,th{text-align:left;vertical-align:top;padding:.2rem .8rem .2rem 0;"
        "border-bottom:1px solid var(--line);overflow-wrap:anywhere;white-space:pre-wrap}",
        "th{overflow-wrap:normal}td div{max-height:9em;overflow:auto}",
        "td:not(:last-child){min-width:5.5rem}",
    ]
    for number, colour in enumerate(_COLOURS, start=1):
        rules.append(
            f".c{number}{{stroke:{colour}}}.f{number}{{fill:{colour}}}"
            f".b{number}{{background:{colour}}}"
        )
    return "".join(rules)
