"""`lightning-dsgd algorithms`: the installed strategies, found by entry point.

An entry that cannot be imported is listed with its error: one broken plugin must not hide the rest.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from importlib.metadata import EntryPoint

from lightning_dsgd.registry import GROUP, algorithms


@dataclass(frozen=True)
class Algorithm:
    """One line of the table; `error` says why the entry could not be loaded."""

    name: str
    strategy: str
    summary: str = ""
    paper: str = ""
    distribution: str = ""
    error: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the table; 1 if not one algorithm can be used."""
    found = installed()
    print(json.dumps([asdict(a) for a in found], indent=2) if args.json else as_text(found))
    return 0 if any(not a.error for a in found) else 1


def installed() -> list[Algorithm]:
    """All entries of the group, by name."""
    return [describe(entry) for entry in algorithms().values()]


def describe(entry: EntryPoint) -> Algorithm:
    """Load one entry and take the two lines its strategy says about itself."""
    distribution = entry.dist.name if entry.dist else ""
    try:
        strategy = entry.load()
    except Exception as error:  # whatever a third party's module raises is its own line here
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return Algorithm(entry.name, entry.value, distribution=distribution, error=reason)
    return Algorithm(
        entry.name,
        entry.value,
        summary=getattr(strategy, "summary", ""),
        paper=getattr(strategy, "paper", ""),
        distribution=distribution,
    )


def as_text(found: list[Algorithm]) -> str:
    """Name and summary on one line, the paper below."""
    if not found:
        return f"no algorithms: no installed package has entry points in the group {GROUP!r}"
    width = max(len(a.name) for a in found)
    lines = []
    for algorithm in found:
        text = f"cannot be loaded: {algorithm.error}" if algorithm.error else algorithm.summary
        lines.append(f"{algorithm.name:<{width}}  {text}".rstrip())
        if algorithm.paper:
            lines.append(f"{'':<{width}}  {algorithm.paper}")
    return "\n".join(lines)
