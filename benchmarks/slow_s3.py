"""An S3 server whose first byte takes long: moto's, behind a proxy that holds every request back."""

import asyncio
import contextlib
import functools
import logging
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import boto3

BUCKET = "benchmark"


@contextlib.contextmanager
def slow_s3(files: Mapping[str, Path], delay_s: float, core: int) -> Iterator[str]:
    """Yield a bucket with these files by their keys, on a server with a core of its own. The environment names the server."""
    context = multiprocessing.get_context("spawn")
    ports = context.Queue()
    server = context.Process(target=_serve, args=(core, delay_s, ports), daemon=True)
    server.start()
    direct, delayed = ports.get(timeout=120)
    known = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1",
             "AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}  # fmt: skip
    os.environ.update(known, AWS_ENDPOINT_URL=f"http://127.0.0.1:{delayed}")
    client: Any = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{direct}", region_name="us-east-1")
    client.create_bucket(Bucket=BUCKET)
    for key, path in files.items():
        client.put_object(Bucket=BUCKET, Key=key, Body=path.read_bytes())
    try:
        yield BUCKET
    finally:
        server.terminate()
        server.join()


def _serve(core: int, delay_s: float, ports: Any) -> None:
    from moto.server import ThreadedMotoServer

    os.sched_setaffinity(0, {core})
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    asyncio.run(_proxy(port, delay_s, functools.partial(_tell, ports, port)))


def _tell(ports: Any, direct: int, delayed: int) -> None:
    ports.put((direct, delayed))


async def _proxy(port: int, delay_s: float, ready: Any) -> None:
    """Forward connections to a port; hold back what clients send."""

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wait_s: float) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                await asyncio.sleep(wait_s)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            behind_reader, behind_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(forward(reader, behind_writer, delay_s), forward(behind_reader, writer, 0.0))

    proxy = await asyncio.start_server(connected, "127.0.0.1", 0)
    ready(proxy.sockets[0].getsockname()[1])
    await proxy.serve_forever()
