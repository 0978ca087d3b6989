"""Writes docs/evidence.md: each claim of the README and of the articles, with the figure that was measured, its command and its picture."""

from __future__ import annotations

from pathlib import Path

from benchmarks.claims import CLAIMS, Claim

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "evidence.md"
HEAD = """# Evidence

What the README claims, and what the articles claim that this project answers: where it was measured, the figure, and the command
that prints it. [The results](../benchmarks/results/README.md) hold machine, versions and every repeat. *Emulated hosts* are network
namespaces of one machine. A *paced accelerator* takes a given time for a step, and stands for a GPU. `make map` writes this page from
the records; a test holds that it is current.

| claim | whose | where | measured | command | picture |
|---|---|---|---|---|---|
"""
NEVER = """
## Never shown

| claim | whose | why |
|---|---|---|
"""
GUARD = """
## Over time

`make bench` measures the ratios that matter anew, and compares them with [the record](../benchmarks/results/guard.json). It ends with
exit code 1 if one is worse by more than this machine's noise. `python -m benchmarks.history -o history.html` draws each figure over the
commits that recorded it.
"""


def written() -> str:
    """Return the page."""
    shown = [claim for claim in CLAIMS if claim.figures]
    never = [claim for claim in CLAIMS if not claim.figures]
    return "".join(
        [
            HEAD,
            *map(_line, shown),
            NEVER,
            *(f"| {claim.says} | {claim.source} | {claim.remark} |\n" for claim in never),
            GUARD,
        ]
    )


def _line(claim: Claim) -> str:
    figures = "; ".join(figure.text() for figure in claim.figures)
    measured = f"{figures}. {claim.remark}".rstrip()
    commands = "; ".join(f"`{command.strip()}`" for command in claim.command.split(";"))
    picture = f"[picture](../benchmarks/results/{claim.picture})" if claim.picture else ""
    return f"| {claim.says} | {claim.source} | {claim.where} | {measured} | {commands} | {picture} |\n"


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
