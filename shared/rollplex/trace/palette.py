"""Colours and words of the timeline picture.

Boxes have mid-tone fills that carry dark text on light and dark pages alike; only page, ink and lines follow the
reader's colour scheme.
"""

from __future__ import annotations

from rollplex.journal.phases import Phase

BOXES = {
    "prefill": ("prefill", "#8cc4e8", "prefill"),
    "decode": ("decode", "#5aa2dc", "decode"),
    "reference_prefix": ("reference prefix", "#bcdc9a", "reference"),
    "actor_prefix": ("actor prefix", "#6cb860", "actor"),
    "score": ("score", "#f0c850", "score"),
    "prefix_backward": ("prefix backward", "#ee9450", "backward"),
    "suffix": ("suffix forward, backward", "#bca6ec", "suffix"),
    "vote": ("sum and vote", "#d2b4e6", "vote"),
    "optimizer": ("optimizer step", "#9a86e0", "optimizer"),
    "reward": ("rewards", "#e6a0bc", "reward"),
}
"""By kind of mark: words of the legend, fill, label in the box."""
_SHADED = {Phase.ROLLOUT: 1, Phase.SCORE: 2, Phase.TRAIN: 1, Phase.UPDATE: 2}

_LIGHT = {"bg": "#ffffff", "ink": "#1f2328", "dim": "#59636e", "grid": "#d8dee4", "win": "#e4f0fb"}
_DARK = {"bg": "#0d1117", "ink": "#f0f6fc", "dim": "#9198a1", "grid": "#30363d", "win": "#15273a"}
_PHASES_LIGHT, _PHASES_DARK = ("#eaeef2", "#dbe1e7"), ("#21262d", "#30363d")


def phase_class(phase: str) -> str:
    """The class of a phase's box: neighbours differ."""
    return next((f"p{shade}" for known, shade in _SHADED.items() if known.name == phase), "p1")


def style() -> list[str]:
    """The picture's style sheet."""
    lines = ["text{font:12px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}"]
    lines += [".n{text-anchor:end}", ".m{text-anchor:middle}", ".i{fill:#101418}", "line{stroke-width:1}"]
    lines += [f".k-{kind}{{fill:{fill}}}" for kind, (_, fill, _) in BOXES.items()]
    lines += _scheme(_LIGHT, _PHASES_LIGHT)
    return [*lines, "@media (prefers-color-scheme:dark){", *_scheme(_DARK, _PHASES_DARK), "}"]


def _scheme(colours: dict[str, str], phases: tuple[str, str]) -> list[str]:
    dashed = f".s{{stroke:{colours['dim']};stroke-dasharray:3 3}}"
    return [
        f".bg{{fill:{colours['bg']}}} .w{{fill:{colours['win']}}} .p1{{fill:{phases[0]}}} .p2{{fill:{phases[1]}}}",
        f".t,.n{{fill:{colours['ink']}}} .m,.d{{fill:{colours['dim']}}}",
        f".g{{stroke:{colours['grid']}}} .e{{stroke:{colours['ink']}}} {dashed}",
    ]
