"""Rollplex itself and the libraries it needs: what is installed against what is asked for. Imports none."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

import rollplex
from rollplex.cli.doctor.finding import Finding, note, ok, problem

PACKAGE = "rollplex"
DEVELOPMENT = "dev"
"""The extra that a report leaves out."""
_GIT_S = 5.0


def check() -> Iterator[Finding]:
    """Rollplex, required and optional libraries."""
    yield ok("rollplex", rollplex.__version__ + _commit(Path(rollplex.__file__).parents[2]))
    try:
        found = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        yield note("libraries", "Rollplex is not installed: it runs from its sources", "pip install -e .")
        return
    yield from of_requirements([Requirement(text) for text in found])


def of_requirements(requirements: list[Requirement]) -> Iterator[Finding]:
    """One line for all that are well, one for each that is not, one for those that may be missing."""
    good: list[str] = []
    bad: list[Finding] = []
    missing: dict[str, list[str]] = {}
    for requirement in requirements:
        extra = _extra(requirement)
        if extra == DEVELOPMENT or (extra is None and not _applies(requirement)):
            continue
        version = _installed(requirement.name)
        if version is None and extra is not None:
            missing.setdefault(requirement.name, []).append(extra)
        elif version is None:
            wanted = f"{requirement.name}{requirement.specifier}"
            bad.append(problem(requirement.name, "not installed", f"pip install '{wanted}'"))
        elif not requirement.specifier.contains(version, prereleases=True):
            bad.append(_wrong(requirement, version, optional=extra is not None))
        else:
            good.append(f"{requirement.name} {version}")
    yield ok("libraries", ", ".join(dict.fromkeys(good)) or "none")
    yield from bad
    if missing:
        told = (f"{name} ({', '.join(extras)})" for name, extras in missing.items())
        yield ok("optional", f"not installed: {', '.join(told)}")


def _wrong(requirement: Requirement, version: str, *, optional: bool) -> Finding:
    text = f"{version}, but {requirement.specifier} is asked for"
    do = f"pip install '{requirement.name}{requirement.specifier}'"
    return note(requirement.name, text, do) if optional else problem(requirement.name, text, do)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _extra(requirement: Requirement) -> str | None:
    """The extra that asks for it; None: everybody needs it."""
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        return None
    names = [extra for extra in _extras() if requirement.marker.evaluate({"extra": extra})]
    return names[0] if names else None


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def _extras() -> list[str]:
    try:
        return metadata.metadata(PACKAGE).get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        return []


def _commit(checkout: Path) -> str:
    """Which commit the sources are at, if they are a checkout of ours and git can tell."""
    if not (checkout / ".git").exists():
        return ""
    commit = _git(checkout, "rev-parse", "--short", "HEAD")
    changed = _git(checkout, "status", "--porcelain", "--untracked-files=no")
    return f", commit {commit}{', with changes' if changed else ''}" if commit else ", a checkout"


def _git(checkout: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(checkout), *arguments], capture_output=True, text=True, check=False, timeout=_GIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
