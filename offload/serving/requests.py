"""The body of a request as a sample: an image, or a row. Pure: bytes in, a sample or the reason of a refusal out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from offload.pipeline.blocks.whole_samples import CONTENTS, LENGTHS, SAMPLES
from offload.pipeline.blocks.wire import HIDDEN, SAMPLE_ID

MOST_BYTES = 64 << 20

BAD, TOO_LARGE, WRONG_TYPE, UNUSABLE, BUSY, FAILED = 400, 413, 415, 422, 503, 500
"""Status codes of HTTP. UNUSABLE: the sample cannot be read or transformed; FAILED: the model cannot be called."""

RESERVED = frozenset((SAMPLE_ID, *HIDDEN, SAMPLES, CONTENTS, LENGTHS))
"""Columns that blocks have of their own. A client's could say that a row holds several samples, and shift the outputs of others."""

FORM = "multipart/form-data"
JSON = "application/json"
_TAKEN = "an image (Content-Type: image/jpeg, image/png or application/octet-stream), a form with an image, or a row as application/json"


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a request has no outputs: the status code, and a sentence for the client."""

    status: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The sample of a request: the bytes of an ``image``, or the values of a ``row``."""

    image: bytes | None = None
    row: dict[str, Any] | None = None


def kind_of(content_type: str) -> str:
    """The media type of a request, without its parameters."""
    return content_type.partition(";")[0].strip().lower()


def sample_of(content_type: str, body: bytes) -> Sample | Refusal:
    """The sample in the body of a request that is no form."""
    kind = kind_of(content_type)
    if len(body) > MOST_BYTES:
        return Refusal(
            status=TOO_LARGE, text=f"The body has {len(body):,} bytes, and at most {MOST_BYTES:,} are taken."
        )
    if kind == JSON or (not kind and body[:1] == b"{"):
        return _row(body)
    if kind and not kind.startswith("image/") and kind != "application/octet-stream":
        return Refusal(status=WRONG_TYPE, text=f"The Content-Type is {kind}. Send {_TAKEN}.")
    if not body:
        return Refusal(status=BAD, text=f"The body is empty. Send {_TAKEN}.")
    return Sample(image=body)


def _row(body: bytes) -> Sample | Refusal:
    try:
        row = json.loads(body)
    except (ValueError, RecursionError) as error:
        return Refusal(status=BAD, text=f"The body is not JSON: {error}.")
    if not isinstance(row, dict) or not row:
        found = "an empty object" if row == {} else f"a {type(row).__name__}"
        return Refusal(status=BAD, text=f"A row is a JSON object with a value for each column, found {found}.")
    if reserved := sorted(RESERVED & row.keys()):
        return Refusal(
            status=BAD, text=f"A column is named {reserved[0]}, which offload adds itself. Give it another name."
        )
    return Sample(row=row)
