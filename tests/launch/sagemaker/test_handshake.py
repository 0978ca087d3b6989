"""Laws of what a job's hosts say to each other: what proves the token, and what is a message."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.launch.sagemaker.container import handshake
from offload.launch.sagemaker.container.handshake import HEADER_BYTES, MESSAGE_BYTES, Role

ROLES = st.sampled_from(("head", "host"))
PARTS = st.tuples(st.text(max_size=8), ROLES, st.text(max_size=8), st.text(max_size=8), st.text(max_size=8))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def proof(parts: tuple[str, Role, str, str, str]) -> str:
    token, role, of_head, of_host, host = parts
    return handshake.proof(token, role, of_head=of_head, of_host=of_host, host=host)


@given(PARTS, PARTS)
def test_a_proof_holds_for_its_token_role_nonces_and_host_alone(
    one: tuple[str, Role, str, str, str], other: tuple[str, Role, str, str, str]
) -> None:
    assert handshake.same(proof(one), proof(other)) == (one == other)


@given(st.text(min_size=1, max_size=4), st.text(max_size=4), st.text(max_size=4))
def test_a_character_belongs_to_one_nonce(first: str, second: str, host: str) -> None:
    here = proof(("t", "host", first, second, host))
    assert here != proof(("t", "host", first[:-1], first[-1] + second, host))


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_a_message_arrives_as_it_was_said(message: dict[str, Any]) -> None:
    sent = handshake.frame(message)
    header, body = sent[:HEADER_BYTES], sent[HEADER_BYTES:]
    assert handshake.length(header, MESSAGE_BYTES) == len(body)
    assert json.dumps(handshake.message_of(body)) == json.dumps(message)  # NaN equals nothing


@given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_message_or_a_value_error(body: bytes) -> None:
    try:
        said = handshake.message_of(body)
    except ValueError:
        return
    assert isinstance(said, dict)
    try:
        host, nonce = handshake.texts(said, "host", "nonce")
    except ValueError:
        return
    assert (host, nonce) == (said["host"], said["nonce"])


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES), st.integers(0, 1 << 32))
def test_no_message_is_longer_than_its_receiver_accepts(header: bytes, most: int) -> None:
    try:
        found = handshake.length(header, most)
    except ValueError:
        assert int.from_bytes(header, "big") > most
    else:
        assert found == int.from_bytes(header, "big") <= most


def test_nonces_differ() -> None:
    assert len({handshake.new_nonce() for _ in range(1000)}) == 1000


def test_a_body_that_nests_too_deep_is_no_message() -> None:
    with pytest.raises(ValueError, match="nest"):
        handshake.message_of(b'{"a":' * 100_000)
