"""Notices that a node is about to be taken back: what the metadata service says, who asks it, and what a run makes of it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from offload.report.events.membership import SpotNoticed
from offload.train.cluster import instance_metadata
from offload.train.cluster.instance_metadata import NOTICE_S, InstanceMetadata, MetadataError, SpotNotice, parse_notice
from tests.emulation.metadata_service import INSTANCE_ACTION, TOKEN, MetadataService
from tests.helpers import ROOT

NOW = 1_505_722_800.0  # 2017-09-18T08:20:00Z
AT = 1_505_722_920.0  # AWS's own example, two minutes later


# --- what is said -----------------------------------------------------------------------------------------------------


def test_a_notice_says_what_happens_and_when() -> None:
    text = '{"action": "stop", "time": "2017-09-18T08:22:00Z"}'
    assert parse_notice(text, NOW) == SpotNotice(action="stop", deadline_at=AT)


@pytest.mark.parametrize("time_", ["2017-09-18T08:22:00", "2017-09-18T10:22:00+02:00", "2017-09-18T08:22:00.000Z"])
def test_times_without_a_zone_are_utc_and_zones_count(time_: str) -> None:
    assert parse_notice(json.dumps({"action": "terminate", "time": time_}), NOW).deadline_at == AT


def test_a_time_that_has_passed_is_now() -> None:
    text = '{"action": "terminate", "time": "2017-09-18T08:22:00Z"}'
    assert parse_notice(text, AT + 60).deadline_at == AT + 60


@pytest.mark.parametrize("rest", ["", ', "time": null', ', "time": "soon"', ', "time": 1505722920'])
def test_a_notice_without_a_time_that_can_be_read_is_one_all_the_same(rest: str) -> None:
    notice = parse_notice('{"action": "terminate"' + rest + "}", NOW)
    assert notice == SpotNotice(action="terminate", deadline_at=NOW + NOTICE_S)


@pytest.mark.parametrize("text", ["", "<html>Welcome</html>", "[]", "null", '{"action": null}', '{"time": "x"}'])
def test_what_is_no_notice_is_not_taken_for_one(text: str) -> None:
    with pytest.raises(MetadataError, match="does not hold a notice"):
        parse_notice(text, NOW)


# --- the service ------------------------------------------------------------------------------------------------------


def test_there_is_no_notice_until_there_is_one() -> None:
    with MetadataService() as service:
        metadata = InstanceMetadata(service.url + "/")
        assert metadata.notice(time.time()) is None
        assert not metadata.rebalance_recommended()
        service.recommend_rebalance()
        service.give_notice(in_s=90, action="hibernate")
        assert metadata.rebalance_recommended()
        notice = metadata.notice(time.time())
    assert notice is not None
    assert notice.action == "hibernate"
    assert 80 < notice.deadline_at - time.time() < 91
    assert service.asked.count(f"PUT {TOKEN}") == 1


def test_a_token_that_expired_is_replaced() -> None:
    with MetadataService() as service:
        metadata = InstanceMetadata(service.url)
        assert metadata.notice(NOW) is None
        service.expire_tokens()
        service.give_notice()
        assert metadata.notice(NOW) is not None
        assert service.asked.count(f"PUT {TOKEN}") == 2


def test_proxies_are_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with MetadataService() as service:
        assert InstanceMetadata(service.url).notice(NOW) is None


@contextmanager
def answering(reply: bytes) -> Iterator[str]:
    """A server that answers everything with these bytes, and, with none, keeps the connection open and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        ended = threading.Event()

        def serve() -> None:
            while True:
                connection, _ = listener.accept()
                with connection:
                    if ended.is_set():
                        return
                    connection.recv(1 << 16)
                    connection.sendall(reply)
                    if not reply:
                        connection.recv(1)  # until the other end gives up

        serving = threading.Thread(target=serve)
        serving.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        ended.set()
        socket.create_connection(listener.getsockname()).close()
        serving.join()


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n", f"PUT {TOKEN} returned status 403"),
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n", "returned status 500"),
        (b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n", "returned status 401"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "SSH-2.0"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n\xff\xfe", "decode"),
        (b"", "timed out"),
    ],
)
def test_an_answer_that_is_none_says_what_it_was(reply: bytes, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_metadata, "TIMEOUT_S", 0.3)
    with answering(reply) as url, pytest.raises(MetadataError, match=said):
        InstanceMetadata(url).notice(NOW)


def test_nobody_there_is_said() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(MetadataError, match="refused"):
            InstanceMetadata(url).notice(NOW)


@pytest.mark.parametrize("endpoint", ["169.254.169.254", "https://169.254.169.254", "http://", "http://host:port"])
def test_an_address_that_is_none_is_said(endpoint: str) -> None:
    with pytest.raises(MetadataError):
        InstanceMetadata(endpoint).notice(NOW)


def test_a_garbled_notice_is_no_notice_and_no_silence() -> None:
    with MetadataService() as service:
        service.answer(INSTANCE_ACTION, "{")
        with pytest.raises(MetadataError, match="does not hold a notice"):
            InstanceMetadata(service.url).notice(NOW)


# --- what users read --------------------------------------------------------------------------------------------------


def test_a_notice_is_told_in_words() -> None:
    told = SpotNoticed(at=NOW, node="10.0.0.7", source=None, action="terminate", deadline_at=NOW + 118).sentence({})
    assert told == "AWS takes node 10.0.0.7 back in 118 s (terminate): the run drains it"


# --- runs -------------------------------------------------------------------------------------------------------------


def run(scenario: str, folder: Path, *, status: str = "finished") -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.programs.spot_nodes", scenario, str(folder)],
        capture_output=True, text=True, timeout=800, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert told["status"] == status
    return told


def of_kind(told: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [event for event in told["events"] if event["event"] == kind]


@pytest.mark.ray
@pytest.mark.slow
class TestRuns:
    """On a Ray cluster of several raylets, of which some have the label of a spot node and a metadata service."""

    def test_a_notice_is_followed_by_a_commit_and_the_node_is_left(self, tmp_path: Path) -> None:
        told = run("notice", tmp_path)
        (notice,) = of_kind(told, "spot_notice")
        assert (notice["action"], notice["source"]) == ("terminate", told["service"])
        assert notice["deadline_at"] == pytest.approx(told["noticed_at"] + NOTICE_S, abs=10)
        (changed,) = of_kind(told, "cluster_changed")
        assert changed["leaving"] == [notice["node"]]
        (committed,) = [event for event in of_kind(told, "checkpoint") if event["reason"] == "resize"]
        assert committed["at"] < notice["deadline_at"]  # how soon: benchmarks/spot_notice.py
        assert told["right"]
        assert told["repeated_steps"] == 0
        assert (told["workers"][0], told["workers"][-1]) == (2, 1)
        assert not of_kind(told, "worker_lost")
        assert told["left"]  # nothing of the run was there any more, so that Ray ended the node
        assert told["watchers"] == [2, 0]
        assert len(of_kind(told, "spot_rebalance")) == 1
        (unwatched,) = of_kind(told, "spot_unwatched")  # the other node's service does not answer: said once
        assert "refused" in unwatched["reason"]

    @pytest.mark.soak
    def test_both_workers_go_on_when_another_node_comes(self, tmp_path: Path) -> None:
        told = run("replaced", tmp_path)
        assert len(of_kind(told, "spot_notice")) == 1
        assert [event["workers"] for event in of_kind(told, "cluster_changed")][:2] == [0, 2]
        assert set(told["workers"]) == {2}
        assert told["right"]
        assert told["repeated_steps"] == 0

    @pytest.mark.soak
    def test_a_worker_leaves_a_drained_node_although_as_many_fit_elsewhere(self, tmp_path: Path) -> None:
        told = run("spare", tmp_path)
        (_, drained) = of_kind(told, "cluster_changed")  # behind the node that joined
        assert len(drained["leaving"]) == 1
        assert not of_kind(told, "worker_lost")
        (committed,) = [event for event in of_kind(told, "checkpoint") if event["reason"] == "resize"]
        assert committed["at"] < told["noticed_at"] + NOTICE_S
        assert told["right"]
        assert told["repeated_steps"] == 0
        assert set(told["workers"]) == {2}
        assert told["left"]

    @pytest.mark.soak
    def test_a_run_whose_head_is_leaving_commits_and_is_resumed(self, tmp_path: Path) -> None:
        told = run("head", tmp_path, status="interrupted")
        (leaving,) = of_kind(told, "run_leaving")
        assert leaving["at"] < told["noticed_at"] + NOTICE_S
        (committed,) = [event for event in of_kind(told, "checkpoint") if event["reason"] == "stop"]
        assert committed["at"] < told["noticed_at"] + NOTICE_S
        again = run("again", tmp_path)
        (resumed,) = of_kind(again, "resumed")
        assert resumed["step"] == committed["step"]
        assert again["right"]
        assert again["repeated_steps"] == 0
