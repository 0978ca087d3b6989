"""Shared by the tests of SageMaker: what its SDK and botocore would do again for each client, they do once."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import botocore.session
import jsonschema
import pytest


@pytest.fixture(scope="session", autouse=True)
def read_and_checked_once() -> Iterator[None]:
    """Let all sessions of botocore share the models of services that they have read. Let the SDK check the schema of its configuration
    once, not with each of the values that it looks up."""
    validators: dict[int, Any] = {}

    def validate(instance: Any, schema: Any) -> None:
        if id(schema) not in validators:
            kind = jsonschema.validators.validator_for(schema)
            kind.check_schema(schema)
            validators[id(schema)] = kind(schema)
        validators[id(schema)].validate(instance)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(botocore.session, "create_loader", functools.cache(botocore.session.create_loader))
        patched.setattr(jsonschema, "validate", validate)
        yield
