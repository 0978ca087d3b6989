"""Reads and writes a cache until it is killed, or some rounds long: python -m tests.programs.cache_writer FOLDER SIZE SOURCE ROUNDS.

Every content follows from its key, so that a reader can tell a wrong one.
"""

from __future__ import annotations

import hashlib
import random
import sys

from offload.pipeline.cache.spec import parse_cache
from offload.pipeline.cache.store import Store

KEYS = 64


def key_of(number: int) -> str:
    return hashlib.blake2b(str(number).encode(), digest_size=16).hexdigest()


def content_of(number: int) -> bytes:
    return random.Random(number).randbytes(1 + 997 * number)


def main() -> None:
    folder, size, name, rounds = sys.argv[1:]
    spec = parse_cache("cache", f"ssd:{folder}:{size}")
    assert spec is not None
    store = Store(spec)
    source = store.source(name)
    draw = random.Random()
    for turn in range(int(rounds) or sys.maxsize):
        number = draw.randrange(KEYS)
        with source.alone(key_of(number)):
            if (found := source.get(key_of(number), 1)) is None:
                source.put(key_of(number), 1, content_of(number))
            else:
                assert found == content_of(number), "a wrong content"
        if turn % 7 == 0:
            # Another version takes the place of the one before.
            source.put(key_of(number), 1 + turn % 2, content_of(number))
        if turn == 0:
            print("writing", flush=True)
    assert not store.stopped


if __name__ == "__main__":
    main()
