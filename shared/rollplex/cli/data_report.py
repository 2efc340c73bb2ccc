"""A report on a dataset as lines of text. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rollplex.data.report import Bar, Histogram, Report

BAR_WIDTH = 40
MAX_SHOWN = 20
"""Errors told; the JSON report has more."""
MAX_TEXT_CHARS = 4000


def lines_of(report: Report) -> Iterator[str]:
    """The whole report."""
    rows = f"{report.rows} rows" if report.good_rows == report.rows else f"{report.rows} rows, {report.good_rows} good"
    yield f"{report.file}: {rows}; {report.format}, shape {report.shape}"
    yield f"columns {', '.join(report.columns) or 'none'}"
    yield from _media(report)
    if report.prompt_tokens is not None:
        yield from _bars("tokens of a prompt, media included", report.prompt_tokens)
    yield from _errors(report)
    for warning in report.warnings:
        yield f"warning: {warning}"
    if not report.model:
        yield "checked without a model: prompts were not tokenized (--model DIR or --config CONFIG)"
    yield from _first(report)


def _media(report: Report) -> Iterator[str]:
    yield f"images {report.images}, videos {report.videos}, rows without either {report.rows_without_media}"
    if report.image_sides is not None and report.smallest_image is not None and report.largest_image is not None:
        (low_w, low_h), (high_w, high_h) = report.smallest_image, report.largest_image
        yield from _bars(
            f"sides of images in pixels, √(width × height); {low_w} × {low_h} to {high_w} × {high_h}",
            report.image_sides,
        )
    if report.video_frames is not None:
        yield from _bars("frames of a video", report.video_frames)


def _bars(title: str, histogram: Histogram) -> Iterator[str]:
    yield ""
    yield f"{title}: {histogram.least} to {histogram.most}, median {histogram.median}"
    names = [_name(bar) for bar in histogram.bars]
    most = max(bar.count for bar in histogram.bars)
    width = max(map(len, names))
    for name, bar in zip(names, histogram.bars, strict=True):
        length = max(1, round(BAR_WIDTH * bar.count / most)) if bar.count else 0
        yield f"  {name:>{width}}  {'█' * length}{' ' if length else ''}{bar.count}"


def _name(bar: Bar) -> str:
    return str(bar.low) if bar.low == bar.high else f"{bar.low} to {bar.high}"


def _errors(report: Report) -> Iterator[str]:
    yield ""
    yield f"errors: {report.num_errors or 'none'}"
    if len(report.kinds) < report.num_errors:
        for what, count in sorted(report.kinds.items(), key=lambda item: -item[1]):
            yield f"  {count:>6}  {what}"
    for problem in report.errors[:MAX_SHOWN]:
        needed = f"; needed {problem.needed}" if problem.needed else ""
        got = f"; got {problem.got}" if problem.got else ""
        do = f". {problem.do}" if problem.do else ""
        yield f"error: {problem.where}: {problem.what}{got}{needed}{do}"
    if report.num_errors > MAX_SHOWN:
        yield f"error: … and {report.num_errors - MAX_SHOWN} more rows"


def _first(report: Report) -> Iterator[str]:
    if report.first is None:
        return
    yield ""
    yield f"prompt of row {report.first.row}, as text:"
    yield _cut(report.first.text)
    if report.first.marked:
        yield ""
        yield f"as the model gets it, {report.first.tokens} tokens:"
        yield _cut(report.first.marked)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT_CHARS else f"{text[:MAX_TEXT_CHARS]} … ({len(text)} characters)"
