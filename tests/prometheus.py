"""A real Prometheus that scrapes this machine, and the data of a dashboard's panels in it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from offload.callbacks import grafana_dashboard
from tests.helpers import eventually

EVERY_S = 1


def program() -> str:
    """Prometheus. Skips the test where there is none; with CI=true there must be one."""
    found = shutil.which("prometheus")
    if found is None:
        reason = "no prometheus: apt-get install prometheus"
        if os.environ.get("CI") == "true":
            pytest.fail(f"with CI=true metrics must be scraped: {reason}")
        pytest.skip(reason)
    return found


def free_port() -> int:
    """A port of this machine that nothing uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Prometheus:
    """A server at ``url``."""

    url: str

    def ask(self, what: str, **values: Any) -> Any:
        """An answer of its HTTP API."""
        query = urllib.parse.urlencode(values)
        with urllib.request.urlopen(f"{self.url}/api/v1/{what}?{query}", timeout=60) as answer:
            return json.load(answer)["data"]

    def series(
        self, expr: str, start: float, end: float, step_s: float = 1.0
    ) -> list[tuple[dict[str, str], list[Any]]]:
        """Labels and (time, value) pairs of each series that an expression of the dashboard gives, for all runs."""
        found = self.ask("query_range", query=expr.replace("$run", ".*"), start=start, end=end, step=step_s)
        return [(each["metric"], [(at, float(value)) for at, value in each["values"]]) for each in found["result"]]


@contextmanager
def scraping(target: str, folder: Path) -> Iterator[Prometheus]:
    """A Prometheus that scrapes ``host:port``, and listens on this machine alone."""
    config = folder / "prometheus.json"  # JSON is YAML
    jobs = [{"job_name": "ray", "static_configs": [{"targets": [target]}]}]
    config.write_text(json.dumps({"global": {"scrape_interval": f"{EVERY_S}s"}, "scrape_configs": jobs}))
    url = f"127.0.0.1:{free_port()}"
    command = [
        program(),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={url}",
    ]
    with open(folder / "prometheus.log", "wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            eventually(lambda: _ready(f"http://{url}/-/ready"))
            yield Prometheus(f"http://{url}")
        finally:
            process.terminate()


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10):
            return True
    except OSError:
        return False


def dashboard() -> dict[str, Any]:
    """The dashboard as its JSON says it."""
    document: dict[str, Any] = json.loads(grafana_dashboard())
    return document


def expressions() -> dict[str, str]:
    """All expressions of the dashboard: of its panels, as ``title / A``, and of its annotations."""
    found = dashboard()
    panels = {f"{p['title']} / {t['refId']}": t["expr"] for p in found["panels"] for t in p["targets"]}
    return panels | {each["name"]: each["expr"] for each in found["annotations"]["list"]}
