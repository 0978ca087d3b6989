"""The AWS clients that a launch needs. Refusals become errors with a remedy.

boto3 reads endpoint variables (``AWS_ENDPOINT_URL``, ``AWS_ENDPOINT_URL_SAGEMAKER``, …) and credentials.
Where it stops: it knows nothing of offload's jobs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import botocore.exceptions
from botocore.config import Config

import offload
from offload.errors import ConfigError, argument
from offload.launch.launcher import NoCapacity

if TYPE_CHECKING:
    import boto3

_PATIENT = Config(
    retries={"mode": "standard", "max_attempts": 8},  # after throttling and transient failures, with growing pauses
    connect_timeout=10,
    read_timeout=60,
    user_agent_extra=f"offload/{offload.__version__}",
)
_NO_CREDENTIALS = (
    botocore.exceptions.NoCredentialsError,
    botocore.exceptions.PartialCredentialsError,
    botocore.exceptions.TokenRetrievalError,
    botocore.exceptions.SSOError,
    botocore.exceptions.ProfileNotFound,
)
_REGION = re.compile(r"[a-z]{2,4}(-[a-z]+)+-\d")
_BAD_CREDENTIALS = {
    "UnrecognizedClientException", "InvalidClientTokenId", "InvalidAccessKeyId", "SignatureDoesNotMatch",
    "ExpiredToken", "ExpiredTokenException", "InvalidSignatureException",
}  # fmt: skip
_DENIED = {"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403"}
_THROTTLED = {"ThrottlingException", "Throttling", "TooManyRequestsException", "RequestLimitExceeded", "SlowDown"}
_NO_BUCKET = {"NoSuchBucket", "404"}


class NoRegionError(ConfigError):
    """Neither the user nor the AWS configuration names a region."""


def region_of(name: str) -> str:
    """A region's name. Raises ConfigError for text that cannot be one."""
    if not _REGION.fullmatch(name):
        raise ConfigError(f"there is no AWS region {name!r}; an example is us-east-1.")
    return name


FALLBACK_REGION = "us-east-1"
NO_REGION = f"the AWS region is unknown: the request uses {FALLBACK_REGION}; pass --region."


class Service:
    """Clients of one region.

    Args:
        region: the region of the service; None: the session's.
        session: a boto3 session to use; None: the default one.

    Raises ConfigError if no region is known.
    """

    def __init__(self, region: str | None = None, session: boto3.Session | None = None) -> None:
        import boto3

        with asking("read the AWS configuration"):
            self.session = session or boto3.Session()
        name = region or self.session.region_name
        if name is None:
            raise NoRegionError(
                f"the AWS region is unknown: pass, for example, {argument('region', 'us-east-1')}, or set AWS_DEFAULT_REGION."
            )
        self.region: str = region_of(name)

    @cached_property
    def sagemaker(self) -> Any:
        """The client that starts and describes jobs."""
        return self._client("sagemaker")

    @cached_property
    def s3(self) -> Any:
        """The client for uploads."""
        return self._client("s3")

    @cached_property
    def logs(self) -> Any:
        """The client that reads the output of jobs."""
        return self._client("logs")

    def _client(self, name: str) -> Any:
        with asking(f"reach {name}"):
            try:
                return self.session.client(name, region_name=self.region, config=_PATIENT)  # type: ignore[call-overload]
            except ValueError as error:  # an endpoint that is no URL
                raise ConfigError(
                    f"cannot reach {name}: {error}. Check the AWS_ENDPOINT_URL variables: they begin with https:// or http://."
                ) from None


def service_of(region: str | None, *, dry_run: bool) -> Service:
    """The service of a region. If none is known, a dry run's request names :data:`FALLBACK_REGION`, and a line on standard error says so.

    Raises NoRegionError if none is known and the request is a real one.
    """
    try:
        return Service(region)
    except NoRegionError:
        if not dry_run:
            raise
        print(NO_REGION, file=sys.stderr)
        return Service(FALLBACK_REGION)


class AccessDenied(ConfigError):
    """The credentials are valid, but do not allow the action."""


class NoAnswer(ConfigError):
    """AWS cannot be reached, or does not answer."""


@contextmanager
def asking(what: str) -> Iterator[None]:
    """A context that turns AWS's errors into ConfigError (NoCapacity if it lacks instances), each with a remedy.

    ``what``: the attempted action, such as ``start the training job``.
    """
    try:
        yield
    except _NO_CREDENTIALS as error:
        raise ConfigError(
            f"cannot {what}: no usable AWS credentials ({error}). Run `aws configure` or `aws sso login`, or set "
            f"AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; {argument('dry_run', True, python='rendering a request')} needs none."
        ) from None
    except botocore.exceptions.ClientError as error:
        raise _of_client(error, what) from None
    except (botocore.exceptions.HTTPClientError, botocore.exceptions.ConnectionError) as error:
        raise NoAnswer(
            f"cannot {what}: {error} Check the network, the region and the AWS_ENDPOINT_URL variables."
        ) from None
    except botocore.exceptions.BotoCoreError as error:
        raise ConfigError(f"cannot {what}: {error}") from None


def _of_client(error: botocore.exceptions.ClientError, what: str) -> ConfigError:
    code, said = error.response["Error"].get("Code", ""), error.response["Error"].get("Message", "").strip()
    if code == "ResourceLimitExceeded" or "CapacityError" in said:
        return NoCapacity(
            f"cannot {what}: {said} Ask for more under Service Quotas (SageMaker, '... for training job usage'), take other types, or "
            "launch with --plan, which tries the next best."
        )
    if code in _BAD_CREDENTIALS:
        return ConfigError(f"cannot {what}: AWS does not accept the credentials ({code}: {said}). Renew them.")
    if code in _DENIED:
        return AccessDenied(
            f"cannot {what}: access is denied to {error.operation_name} ({said or code}). offload's page 'On Amazon SageMaker' has "
            "the policy that launching needs."
        )
    if code in _THROTTLED:
        return ConfigError(
            f"cannot {what}: AWS answered {code} ({said}) {_attempts(error)} times in a row. Try again in a minute."
        )
    if code in _NO_BUCKET:
        return ConfigError(f"cannot {what}: {said or code}. Check {argument('bucket')} and {argument('region')}.")
    return ConfigError(f"cannot {what}: {code}: {said}")


def _attempts(error: botocore.exceptions.ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("RetryAttempts", 0)) + 1
