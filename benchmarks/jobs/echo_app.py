"""A Serve application with the parts of offload.serving and nothing in them: what Serve itself takes for a request."""

from typing import Any

import fastapi
from ray import serve

_http = fastapi.FastAPI()


class First:
    """In the place of preprocessing."""

    async def __call__(self, content: bytes) -> bytes:
        return content


class Second:
    """In the place of the model."""

    async def __call__(self, content: bytes) -> dict[str, int]:
        return {"output": len(content)}


@serve.ingress(_http)
class Front:
    """The replica that clients reach."""

    def __init__(self, first: Any, second: Any) -> None:
        self._first, self._second = first, second

    @_http.post("/predict")
    async def predict(self, request: fastapi.Request) -> dict[str, int]:
        """The length of the body."""
        answer: dict[str, int] = await self._second.remote(self._first.remote(await request.body()))
        return answer


def app() -> serve.Application:
    """The application."""
    part = serve.deployment(ray_actor_options={"num_cpus": 0})
    return part(Front).bind(part(First).bind(), part(Second).bind())
