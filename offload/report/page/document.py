"""The numbers of a page for other programs, without the charts: what ``offload report --json`` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from offload.model.catalog import Catalog
from offload.report.page.compare import speed_up
from offload.report.page.records import Records
from offload.report.page.story import Story
from offload.report.page.view import PageView


def document_of(
    page: PageView, records: Sequence[Records], catalog: Catalog, given: Mapping[str, float]
) -> dict[str, Any]:
    """The page's numbers for other programs, without the charts."""
    stories = [Story(each, catalog, given) for each in records]
    runs = []
    for story, view in zip(stories, page.runs, strict=True):
        whole = story.whole
        faster = speed_up(stories[0], story) if story is not stories[0] else None
        runs.append(
            {
                "name": view.name,
                "run_dir": str(story.records.path),
                "status": view.status,
                "error": view.error or None,
                "verdict": view.verdict,
                "next": view.following,
                "alone": view.alone,
                "samples": story.samples,
                "samples_per_s": whole.samples_per_s if whole else None,
                "step_time_s": whole.step_s if whole else None,
                "stall": whole.stall if whole else None,
                "busy": whole.busy if whole else None,
                "usd_per_hour": story.mean_usd_per_hour,
                "usd_per_million_samples": story.mean_usd_per_million,
                "usd": story.usd,
                "usd_at_end": story.usd_at_end,
                "speed_up": None if faster is None else {"ratio": faster.ratio, "low": faster.low, "high": faster.high},
                "notes": list(view.notes),
            }
        )
    return {"schema": "offload.report/1", "runs": runs}
