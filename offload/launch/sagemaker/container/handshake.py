"""What the hosts of a job say to each other, as bytes, and how two of them prove the job's token: pure.

A message is a JSON object after its length. Its receiver states the largest length that it accepts. Nothing is unpickled.

A handshake has four messages. The head begins, and its peer is the first to prove anything:

1. head → peer: ``{"nonce"}``, random and new for this connection.
2. peer → head: ``{"host", "nonce", "proof"}``, the peer's name, its own nonce, and its proof.
3. head → peer: ``{"proof"}``; or ``{"refused": true}``, and the connection ends.
4. peer → head: ``{}``, once it has checked the head's proof.

A proof is an HMAC under the token. It covers the role of its sender, both nonces and the host's name: no proof of one role, connection or
host passes for another's. The token itself does not travel. Where it stops: :mod:`offload.launch.sagemaker.container.rendezvous` owns
the sockets. A handshake proves who opened a connection; it encrypts nothing, and later messages carry no proof.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import struct
from collections.abc import Mapping
from typing import Any, Literal

GREETING_BYTES = 1 << 10
"""The largest message of a handshake: anyone in the network may send one."""
MESSAGE_BYTES = 1 << 20
TEXT_CHARS = (
    10_000  # of one text in a message; JSON may take 6 bytes for a character, so that a hundred fields fit in a message
)
NONCE_BYTES = 32
HEADER_BYTES = 4
_PURPOSE = "offload rendezvous 1"
_LENGTH = struct.Struct("!I")

Role = Literal["head", "host"]


def new_nonce() -> str:
    """A random text that no other handshake has."""
    return secrets.token_hex(NONCE_BYTES)


def proof(token: str, role: Role, *, of_head: str, of_host: str, host: str) -> str:
    """The proof that its sender knows the token.

    Args:
        token: the token of the job.
        role: the role of the sender.
        of_head, of_host: the nonces of both sides.
        host: the name of the host that is not the head.
    """
    covered = json.dumps([_PURPOSE, role, of_head, of_host, host]).encode()  # JSON keeps the parts apart
    return hmac.new(token.encode(), covered, hashlib.sha256).hexdigest()


def same(theirs: str, ours: str) -> bool:
    """Compare two proofs, in a time that does not tell how much of them agrees."""
    return hmac.compare_digest(theirs.encode(errors="replace"), ours.encode())


def frame(message: Mapping[str, Any]) -> bytes:
    """A message as bytes. It shortens long texts, such as the reason of a failure."""
    body = json.dumps(_shortened(message)).encode()
    return _LENGTH.pack(len(body)) + body


def length(header: bytes, most_bytes: int) -> int:
    """The length of the body that follows a header. Raises ValueError if it is larger than accepted."""
    (found,) = _LENGTH.unpack(header)
    if found > most_bytes:
        raise ValueError(f"a message must have at most {most_bytes} bytes, found {found}")
    return int(found)


def message_of(body: bytes) -> dict[str, Any]:
    """The message in a body. Raises ValueError for anything but a JSON object."""
    try:
        said = json.loads(body)
    except RecursionError:
        raise ValueError("a message must not nest that deep") from None
    if not isinstance(said, dict):
        raise ValueError(f"a message must be a JSON object, found {type(said).__name__}")
    return said


def texts(message: Mapping[str, Any], *names: str) -> tuple[str, ...]:
    """Fields of a message. Raises ValueError if one is missing or no text."""
    found = tuple(message.get(name) for name in names)
    if not all(isinstance(value, str) for value in found):
        raise ValueError(f"a message must have the texts {', '.join(names)}, found {', '.join(message) or 'none'}")
    return tuple(str(value) for value in found)


def _shortened(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= TEXT_CHARS else value[: TEXT_CHARS - 1] + "…"
    if isinstance(value, Mapping):
        return {name: _shortened(field) for name, field in value.items()}
    return value
