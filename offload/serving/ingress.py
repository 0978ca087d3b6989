"""The replica that clients reach: requests in, samples to the other replicas, outputs or a sentence out."""

# Annotations are objects here, and not text: FastAPI reads them in the copy that Serve makes of the class below.
import asyncio
import time
from collections.abc import Mapping
from typing import Any

import fastapi
import ray
from ray import serve
from starlette.exceptions import HTTPException

from offload.errors import causes
from offload.report.run_dir import to_json
from offload.serving.batches import Outputs
from offload.serving.requests import BAD, BUSY, FAILED, FORM, MOST_BYTES, TOO_LARGE, Refusal, Sample, kind_of, sample_of

RETRY_S = 300.0  # time for a request whose replica was lost to find another
PAUSE_S = 0.1
MOST_DEATHS = 3  # replicas that died while they had a request, before it counts as the cause

_LOST = (
    ray.exceptions.RayActorError,
    ray.exceptions.ObjectLostError,  # the preprocessed sample, with its node
    serve.exceptions.DeploymentUnavailableError,
    serve.exceptions.ReplicaUnavailableError,
)


def _words(error: Exception) -> str:
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {str(cause).strip().splitlines()[0] if str(cause).strip() else 'no message'}"


async def _sample_in(request: fastapi.Request) -> Sample | Refusal:
    """The sample in a request."""
    content_type = request.headers.get("content-type", "")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > MOST_BYTES:
        return Refusal(
            status=TOO_LARGE, text=f"The body has {int(length):,} bytes, and at most {MOST_BYTES:,} are taken."
        )
    if kind_of(content_type) != FORM:
        return sample_of(content_type, await request.body())
    try:
        async with request.form() as form:
            files = [value for value in form.values() if not isinstance(value, str)]
            if len(files) != 1:
                return Refusal(status=BAD, text=f"A form holds one file, the image, found {len(files)}.")
            return sample_of("application/octet-stream", await files[0].read())
    except HTTPException as error:
        return Refusal(status=BAD, text=f"The form cannot be read: {error.detail}.")


def _json(document: Mapping[str, Any], status: int) -> fastapi.Response:
    return fastapi.Response(to_json(dict(document)), status_code=status, media_type="application/json")


_http = fastapi.FastAPI(title="offload")


# Serve copies the class now, with what its methods name: all of that stands above.
@serve.ingress(_http)
class Ingress:
    """The replica that clients reach."""

    def __init__(self, preprocessing: Any, model: Any) -> None:
        self._preprocessing, self._model = preprocessing, model

    @_http.post("/predict")
    async def predict(self, request: fastapi.Request) -> fastapi.Response:
        """The model's outputs for one sample."""
        sample = await _sample_in(request)
        answer = sample if isinstance(sample, Refusal) else await self._answer(sample)
        if isinstance(answer, Refusal):
            return _json({"error": answer.text}, answer.status)
        return _json(answer, 200)

    @_http.get("/")
    async def describe(self) -> fastapi.Response:
        """How to ask."""
        return _json({"predict": "POST an image, a form with an image, or a row as JSON to /predict."}, 200)

    async def _answer(self, sample: Sample) -> Outputs | Refusal:
        """The outputs of a sample. What a lost replica had taken goes to another: a prediction changes nothing, so it may run twice."""
        until, deaths = time.monotonic() + RETRY_S, 0
        while True:
            try:
                # The preprocessed sample goes from replica to replica, and not through this one.
                answer: Outputs | Refusal = await self._model.remote(self._preprocessing.remote(sample))
                return answer
            except serve.exceptions.BackPressureError:
                return Refusal(status=BUSY, text="All replicas are busy. Try again in a moment.")
            except Exception as error:
                found = list(causes(error))
                if not any(isinstance(cause, _LOST) for cause in found):
                    return Refusal(status=FAILED, text=f"The prediction failed: {_words(error)}.")
                deaths += any(isinstance(cause, ray.exceptions.ActorDiedError) for cause in found)
                if deaths >= MOST_DEATHS:
                    # It may be what kills them: no other client should lose all replicas to it.
                    return Refusal(
                        status=FAILED, text=f"{deaths} replicas have died with this request, so no other one gets it."
                    )
                if time.monotonic() > until:
                    return Refusal(status=BUSY, text="The replicas of this request were lost. Try again in a moment.")
                await asyncio.sleep(PAUSE_S)
