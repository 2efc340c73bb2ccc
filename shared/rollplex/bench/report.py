"""A result as tables and sentences, plain or in Markdown. Says what was gained, by what, and what it does not show."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Final, cast

from rollplex.bench.ceilings import HidingCeiling
from rollplex.bench.result import Result
from rollplex.bench.rows import PHASES
from rollplex.bench.summary import COMPARED, Gain, ModeSummary, Spread
from rollplex.bench.tables import Table, markdown, plain

WIDTH: Final = 120
BUSY: Final = 0.05
"""Part of the machine that other programs may use before the report warns."""
BEYOND: Final = 1.05
"""How far above its ceiling a gain may be before the report doubts it: medians of phases do not add up exactly."""
_SHORT: Final = {"prefix_forward": "prefix fwd", "prefix_backward": "prefix bwd"}


def report(result: Result, *, in_markdown: bool = False) -> list[str]:
    """The whole report, line by line."""
    render = markdown if in_markdown else plain
    lines = [*_bullets(head(result), in_markdown), ""]
    lines += ["Seconds of one iteration, medians; phases and units as the columns say.", ""]
    lines += [*render(times(result)), ""]
    lines += ["Gains: more than 1x is faster. Each line changes only what it names.", ""]
    lines += [*render(gains_table(result)), ""]
    lines += ["Rates and memory, as measured; prefix work: forwards, by units.", ""]
    lines += [*render(rates(result)), ""]
    told = (sharing, hiding, beside, exactness, warnings)
    return lines + _bullets([text for part in told for text in part(result)], in_markdown)


def head(result: Result) -> list[str]:
    """What was run, on what, with what."""
    made, facts = result.made, result.facts
    reference = "with" if facts.reference else "without"
    run = cast("Mapping[str, object]", made.config.get("run", {}))
    model = cast("Mapping[str, object]", made.config.get("model", {}))
    model_text = f"{facts.parameters / 1e6:.1f} million parameters, {model.get('dtype')}, {reference} a reference model"
    mode_count = f"{_count(result.repeats, 'repeat')} of {_count(len(result.modes), 'mode')}, interleaved"
    return [
        f"{result.date[:10]}, {made.machine.text}, {made.machine.system}; {made.software.text}.",
        f"Workload: {workload(result)}.",
        f"Model: {model_text}; threads per worker: {run.get('threads')}.",
        f"{mode_count}; {made.iterations} iterations each, the first {made.warmup} not counted.",
        f"Command: `{result.command}`",
    ]


def workload(result: Result) -> str:
    """What one iteration is made of."""
    facts = result.facts
    vision = f" ({_tokens(facts.vision_tokens)} of them vision)" if facts.vision_tokens else ""
    return (
        f"{_count(facts.prompts, 'prompt')} x {facts.group_size} responses an iteration, "
        f"P = {_tokens(facts.prompt_tokens)} prompt tokens{vision}, "
        f"R = {_tokens(result.modes[0].response_tokens)} response tokens, G = {facts.group_size}"
    )


def times(result: Result) -> Table:
    """One line a mode: the iteration with lowest and highest repeat, its phases, prefix forwards, hidden share."""
    known = [name for name in ("prefill", "decode") if all(name in mode.seconds for mode in result.modes)]
    extra = ["prefix_forward", "prefix_backward", *known]
    rows = [
        (
            mode.mode.name,
            _s(mode.seconds["iteration"].median),
            _range(mode.seconds["iteration"]),
            *(_s(mode.seconds[name].median) for name in (*PHASES, *extra)),
            f"{mode.hidden_share.median:.0%}",
        )
        for mode in result.modes
    ]
    named = (_SHORT.get(name, name) for name in (*PHASES, *extra))
    return Table(head=("mode", "s/iteration", "repeats", *named, "hidden"), rows=tuple(rows))


def gains_table(result: Result) -> Table:
    """One line a gain."""
    rows = [
        (
            gain.name,
            verdict(gain),
            f"{gain.low:.2f} to {gain.high:.2f}" if gain.repeats > 1 else "one repeat",
            f"{gain.base.name} {_s(_of(result, gain.base.name).seconds[gain.what].median)} s",
            f"{gain.other.name} {_s(_of(result, gain.other.name).seconds[gain.what].median)} s",
        )
        for gain in result.gains
    ]
    return Table(head=("gain of", "gain", "repeats", "from", "to"), rows=tuple(rows))


def rates(result: Result) -> Table:
    """One line a mode: prompts, tokens a second, prefix work hidden, and on a GPU the peak of each phase."""
    phases = [phase for phase in PHASES if any(phase in mode.peak_bytes for mode in result.modes)]
    rows = [
        (
            mode.mode.name,
            str(mode.prompts or result.facts.prompts),
            f"{mode.decode_tokens_s.median:,.0f}",
            f"{mode.prefix_tokens_s.median:,.0f}",
            f"{mode.work_hidden.median:.0%}",
            *(f"{mode.peak_bytes.get(phase, 0) / 2**30:.1f}" for phase in phases),
        )
        for mode in result.modes
    ]
    head = ("mode", "prompts", "decode tokens/s", "prefix tokens/s", "prefix work hidden")
    return Table(head=(*head, *(f"GiB in {phase}" for phase in phases)), rows=tuple(rows))


def beside(result: Result) -> list[str]:
    """The window ratio and what the rollout paid for it; and which rows were measured with fewer prompts."""
    lines = [
        f"Window with {one.prefix} prefixes: rollout alone {_s(one.rollout_alone_s)} s, prefix forwards alone "
        f"{_s(one.prefix_alone_s)} s, of which {one.work_hidden:.0%} were done beside the rollout, which then took "
        f"{_s(one.rollout_beside_s)} s ({one.slowdown:.2f}x): window ratio {one.ratio:.2f}."
        for one in result.windows
    ]
    fewer = [mode for mode in result.modes if mode.prompts not in (0, result.facts.prompts)]
    lines += [
        f"{mode.mode.name} was measured with {mode.prompts} prompts an iteration. Its SCORE and TRAIN are multiplied "
        f"by {result.facts.prompts / mode.prompts:.3g}; all else is as measured, so that its time, and gains over it, "
        "are lower bounds."
        for mode in fewer
    ]
    return lines


def verdict(gain: Gain) -> str:
    """A gain as a number, or that there is none."""
    if gain.within_noise:
        return f"within noise ({gain.gain:.2f}x, repeats differ by {gain.noise:.0%})"
    if gain.gain < 1.0:
        return f"no gain: {1.0 / gain.gain - 1.0:.0%} slower"
    return f"{gain.gain:.2f}x"


def sharing(result: Result) -> list[str]:
    """What sharing could gain, where, and what it did gain there."""
    g, ceiling = result.facts.group_size, result.sharing
    measured = next((gain for gain in result.gains if gain.what == COMPARED), None)
    text = (
        f"Sharing, ceiling in token-forwards: G(P+R)/(P+GR) = {ceiling.tokens:.2f}x. It concerns reference scoring and "
        "actor training only: the rollout is the same in all modes, so the gain of a whole iteration is smaller. "
    )
    if measured is None:
        return [text + "Measured scoring and training alone: needs serial with both kinds of prefix."]
    text += f"Measured for scoring and training alone (serial, SCORE + TRAIN, prefixes included): {verdict(measured)}."
    lines = [text]
    if ceiling.unit_times is not None:
        lines.append(
            "Tokens are not time: the count leaves out the vision tower (which sharing also runs once per prompt), "
            f"attention and memory. If replicating took just {g} times the prefix time measured under serial shared, "
            f"the gain of scoring and training would be {ceiling.unit_times:.2f}x; the rest is what {g} copies at once "
            "cost more, or less, than that."
        )
    return lines


def hiding(result: Result) -> list[str]:
    """What overlap and stream could hide, and what became of the rollout."""
    lines = []
    for ceiling in result.hiding:
        lines.append(
            f"Overlap, ceiling with {ceiling.prefix} prefixes: what can hide is the smaller of prefix forwards "
            f"({_s(ceiling.prefix_s)} s) and rollout ({_s(ceiling.rollout_s)} s), {_s(ceiling.overlap_s)} s of an "
            f"iteration: at most {ceiling.overlap:.2f}x, if it cost nothing there. Stream can hide scoring and "
            f"training too, as far as groups end early: at most {ceiling.stream:.2f}x."
        )
        lines += _rollouts(result, ceiling)
    return lines


def _rollouts(result: Result, ceiling: HidingCeiling) -> list[str]:
    """How much longer the rollout took with work beside it."""
    beside = [mode for mode in result.modes if mode.prefix == ceiling.prefix and mode.schedule != "serial"]
    if not beside:
        return []
    parts = [
        f"{_s(mode.seconds['rollout'].median)} s under {mode.schedule} "
        f"({mode.hidden_share.median:.0%} of prefix forward time hidden)"
        for mode in beside
    ]
    return [f"Work beside it costs the rollout: {_s(ceiling.rollout_s)} s under serial, {', '.join(parts)}."]


def exactness(result: Result) -> list[str]:
    """Whether the schedules gave the same weights."""
    if not result.compares_bits:
        return ["Weights are not held to the same bits on a GPU: `rollplex bench gradients` compares the schedules."]
    if not result.exact:
        return [f"ERROR: weights differ in the end, {text}" for text in result.unlike]
    if any("" in mode.digests for mode in result.modes):
        return ["Schedules took turns in one node, so that each has a part in its weights: they are not compared."]
    schedules = list(dict.fromkeys(mode.schedule for mode in result.modes))
    prefixes = list(dict.fromkeys(mode.prefix for mode in result.modes))
    if len(schedules) == 1 and result.repeats == 1:
        return []
    return [
        f"Exact: {_and(schedules)} ended with the same weights, bit for bit, in every row with {prefix} prefixes "
        f"(digest {next(m.digests[0] for m in result.modes if m.prefix == prefix)[:12]})."
        for prefix in prefixes
    ]


def warnings(result: Result) -> list[str]:
    """What makes these figures worth less."""
    found = []
    cores = result.made.machine.cores
    if result.others_cpus > BUSY * cores:
        found.append(
            f"WARNING: other programs kept {result.others_cpus:.1f} of {cores} cores busy meanwhile; "
            "on a quiet machine the figures may be others."
        )
    found += [
        f"WARNING: {gain.name}, {gain.gain:.2f}x, is more than could be hidden ({ceiling:.2f}x): the machine was not "
        "equally fast in all rows."
        for gain, ceiling in _with_ceilings(result)
        if gain.gain > BEYOND * ceiling
    ]
    if result.missing:
        found.append(f"WARNING: {_count(result.missing, 'row')} of this bench {_are(result.missing)} not measured yet.")
    if result.repeats == 1:
        found.append("WARNING: one repeat, so it is not known how much the figures differ from run to run.")
    if result.made.software.changes:
        found.append("WARNING: measured with changes that are in no commit.")
    return found


def _with_ceilings(result: Result) -> list[tuple[Gain, float]]:
    """Gains of overlap or stream alone, each with its ceiling."""
    ceilings = {ceiling.prefix: {"overlap": ceiling.overlap, "stream": ceiling.stream} for ceiling in result.hiding}
    return [
        (gain, ceilings[gain.base.prefix][gain.other.schedule])
        for gain in result.gains
        if gain.base.prefix == gain.other.prefix and gain.base.prefix in ceilings
    ]


def _of(result: Result, name: str) -> ModeSummary:
    return next(mode for mode in result.modes if mode.mode.name == name)


def _bullets(texts: list[str], in_markdown: bool) -> list[str]:
    """A list item a text, wrapped at the width of our documents."""
    lines = []
    for text in texts:
        mark = "- " if in_markdown else ""
        indent = "  " if in_markdown or text.startswith("Command:") else ""
        lines += textwrap.wrap(
            mark + text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
    return lines


def _range(spread: Spread) -> str:
    return f"{_s(spread.low)} to {_s(spread.high)}" if spread.count > 1 else "one"


def _s(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds >= 0.995 else f"{seconds:.3f}"


def _tokens(mean: float) -> str:
    return f"{mean:.0f}" if mean == round(mean) else f"{mean:.1f}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _and(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
