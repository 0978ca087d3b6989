"""Whatever answers in a dashboard's place: it is a valid answer, or an error with the address, what came and the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from offload.launch.ray import answers
from offload.launch.ray.answers import Job, UnexpectedAnswer
from offload.launch.ray.running_job import state

URL = "http://head:8265"
RUNNING = {"type": "SUBMISSION", "submission_id": "train-1", "status": "RUNNING", "entrypoint": "x"}
ENDED = {
    **RUNNING,
    "job_id": "02000000",
    "status": "FAILED",
    "message": "Job entrypoint command failed with exit code 1",
    "error_type": "JOB_ENTRYPOINT_COMMAND_ERROR",
    "start_time": 1_700_000_000_000,
    "end_time": 1_700_000_001_500,
    "metadata": {"offload_name": "train", "offload_run_dir": "/runs/train"},
    "runtime_env": {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "300"}},
    "driver_info": None,
    "driver_agent_http_address": "http://10.0.0.1:52365",
    "driver_node_id": "ab",
    "driver_exit_code": 1,
    "attempt_number": 0,  # not in each version
}
READERS: tuple[Callable[[bytes], Any], ...] = (
    lambda body: answers.ray_version(URL, body),
    lambda body: answers.jobs(URL, body),
    lambda body: answers.job(URL, body, "train-1"),
    lambda body: answers.log(URL, body, "train-1"),
    lambda body: answers.submitted(URL, body),
    lambda body: answers.stopped(URL, body, "train-1"),
)

ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
TIMES = st.integers() | st.integers(0, 1 << 43) | ANY
NEARLY_JOBS = st.fixed_dictionaries(
    {},
    optional={
        "status": st.sampled_from(("PENDING", "RUNNING", "FAILED", "STOPPED")) | ANY,
        "submission_id": st.text() | ANY,
        "job_id": st.text() | ANY,
        "metadata": st.dictionaries(st.sampled_from(("offload_name", "offload_run_dir", "x")), ANY) | ANY,
        "runtime_env": st.fixed_dictionaries({"env_vars": st.just({"RAY_JOB_STOP_WAIT_TIME_S": "9" * 5000}) | ANY})
        | ANY,
        "message": st.text() | ANY,
        "error_type": st.text() | ANY,
        "start_time": TIMES,
        "end_time": TIMES,
        "driver_exit_code": st.integers() | st.integers(-64, 255) | ANY,
    },
)
NEARLY = (
    st.lists(NEARLY_JOBS | ANY, max_size=4)
    | NEARLY_JOBS
    | ANY
    | st.fixed_dictionaries({}, optional={"ray_version": ANY, "logs": ANY, "stopped": ANY, "submission_id": ANY})
)


class Cluster:
    url = URL


@given(st.sampled_from(READERS), NEARLY.map(lambda value: json.dumps(value).encode()) | st.binary())
@example(READERS[1], b"")
@example(READERS[1], b"null")
@example(READERS[1], b"{}")
@example(READERS[1], b"[null]")
@example(READERS[1], b"[" * 100_000)
@example(READERS[1], b"9" * 5000)
@example(READERS[1], b"[1e999, NaN]")
@example(READERS[1], json.dumps([ENDED]).encode()[:-2])
@example(READERS[2], b"<!doctype html><html></html>")
@example(READERS[2], json.dumps({**ENDED, "end_time": 10**40}).encode())
@example(READERS[2], json.dumps({**ENDED, "message": "\ud800"}).encode())
@example(READERS[3], b'{"logs": "\\ud800"}')
def test_anything_is_a_valid_answer_or_an_error_that_says_what_came(read: Callable[[bytes], Any], body: bytes) -> None:
    try:
        value = read(body)
    except UnexpectedAnswer as error:
        check_error(error)
    else:
        check_value(value)


def check_error(error: UnexpectedAnswer) -> None:
    said = str(error)
    assert said.startswith(f"the server at {URL} answered ")
    assert " with " in said
    assert " instead of " in said
    assert answers.REMEDY in said
    assert error.exit_code == 2
    assert len(said.splitlines()) == 1
    assert len(said) < 1000
    said.encode()


def check_value(value: Any) -> None:
    for part in value if isinstance(value, list) else [value]:
        if isinstance(part, Job):
            assert part.job_id
            document = state(Cluster(), part)  # type: ignore[arg-type]
            json.dumps(document, ensure_ascii=False, allow_nan=False).encode()
            assert (document["exit_code"] is not None) == part.ended
        else:
            assert isinstance(part, (str, bool))
            str(part).encode()


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b"", "nothing"),
        (b" \n", "nothing"),
        (b"null", "null"),
        (b"true", "true"),
        (b"3", "the number 3"),
        (b'"hello"', "the text 'hello'"),
        (b"{}", "an empty object"),
        (b'{"detail": "sign in", "code": 7}', "an object with 'detail, code'"),
        (b"[1]", "the number 1"),
        (b"[{}]", "an empty object"),
        (b'[{"status": null}]', "status as null"),
        (b'[{"status": "RUNNING"}]', "an object with 'status'"),
        (b'[{"status": "it runs", "submission_id": "a"}]', "a job whose status is 'it runs'"),
        (b'[{"status": "RUNNING", "submission_id": ["a"]}]', "submission_id as a list of 1"),
        (b'[{"status": "RUNNING", "submission_id": "a", "metadata": [1, 2]}]', "metadata as a list of 2"),
        (b'[{"status": "RUNNING", "submission_id": "a", "start_time": -1}]', "start_time as the number -1"),
        (b'[{"status": "RUNNING", "submission_id": "a", "end_time": true}]', "end_time as true"),
        (b"<html>", "an HTML page"),
        (b"\n<!DOCTYPE html>", "an HTML page"),
        (b'[{"status": "RUNN', '17 bytes that are no JSON (\'[{"status": "RUNN\')'),
        (b"\xff\xfe\xfd", "3 bytes that are no JSON ('\ufffd\ufffd\ufffd')"),
    ],
)
def test_an_error_says_what_came(body: bytes, found: str) -> None:
    with pytest.raises(UnexpectedAnswer) as caught:
        answers.jobs(URL, body)
    assert str(caught.value) == (
        f"the server at {URL} answered GET /api/jobs/ with {found} instead of a list of jobs. {answers.REMEDY}: "
        f"curl {URL}/api/jobs/ shows the answer."
    )


@pytest.mark.parametrize("absent", [(), *((name,) for name in ENDED if name not in ("status", "submission_id"))])
def test_a_field_that_offload_does_not_need_may_be_absent_or_null(absent: tuple[str, ...]) -> None:
    """Fields came with versions of Ray: the answers of 2.50 to 2.60 differ in them."""
    for fields in ({k: v for k, v in ENDED.items() if k not in absent}, {**ENDED, **dict.fromkeys(absent)}):
        (job,) = answers.jobs(URL, json.dumps([fields]).encode())
        assert (job.job_id, job.status, job.ended) == ("train-1", "FAILED", True)
        assert job == answers.job(URL, json.dumps(fields).encode(), "train-1")


def test_a_field_that_offload_does_not_know_is_ignored() -> None:
    body = json.dumps({**ENDED, "of_tomorrow": [1]}).encode()
    assert answers.job(URL, body, "train-1") == Job(
        job_id="train-1", status="FAILED", driver_exit_code=1, error_type="JOB_ENTRYPOINT_COMMAND_ERROR",
        message="Job entrypoint command failed with exit code 1", began_ms=1_700_000_000_000, ended_ms=1_700_000_001_500,
        name="train", run_dir="/runs/train", stop_wait_s=300,
    )  # fmt: skip
    assert answers.submitted(URL, b'{"submission_id": "a", "job_id": "b", "of_tomorrow": 1}') == "a"


def test_a_driver_that_was_not_submitted_has_rays_own_id() -> None:
    (job,) = answers.jobs(
        URL, b'[{"type": "DRIVER", "job_id": "01000000", "submission_id": null, "status": "RUNNING"}]'
    )
    assert job.job_id == "01000000"


def test_the_details_of_this_ray_are_a_job() -> None:
    """What Ray's own models write, with all fields."""
    from ray.dashboard.modules.job.pydantic_models import JobDetails

    details = JobDetails(**ENDED)
    assert answers.job(URL, details.model_dump_json().encode(), "train-1").status == "FAILED"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it gave no reason"),
        ("Traceback\n  ...\nValueError: no such key.\n", "ValueError: no such key"),
        ("<html>\n</html>", f"it answered with an HTML page. {answers.REMEDY}"),
        ("x" * 5000, "x" * 299 + "…"),
    ],
)
def test_the_reason_of_a_failed_request_is_its_last_line(text: str, says: str) -> None:
    assert answers.last_line(text) == says
