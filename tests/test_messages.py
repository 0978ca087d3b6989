"""Messages between processes of this machine, and the memory that they share."""

from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.process.memory import ALIGNMENT, Memory
from offload.process.messages import PACKET_BYTES, pair, receive, send

SIZES = st.lists(st.sampled_from([0, 1, 100, PACKET_BYTES - 100, PACKET_BYTES, 3 * PACKET_BYTES + 1]), max_size=4)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, its = pair()
    with ours, its:
        yield ours, its


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@given(arrays=SIZES, texts=SIZES, memories=SIZES)
def test_a_message_arrives_as_it_was_and_stays_without_open_files(
    arrays: list[int], texts: list[int], memories: list[int]
) -> None:
    message = (
        [np.arange(size, dtype=np.uint8) for size in arrays],
        ["x" * size for size in texts],
        [Memory.of([b"first", bytes(size)]) for size in memories],
    )
    ours, its = pair()
    with ours, its:
        before = open_files()
        send(ours, message)
        arrived: Any = receive(its)
        assert open_files() == before + len(memories)
        there, kept = arrived[0], [memory.parts() for memory in arrived[2]]
        assert arrived[1] == message[1]
        del arrived
        assert open_files() == before
    for array, copy in zip(message[0], there, strict=True):
        np.testing.assert_array_equal(array, copy)
        copy += 1  # writable, and nobody else's
        assert not copy.size or copy.ctypes.data % ALIGNMENT == 0
    assert [[len(part) for part in parts] for parts in kept] == [[5, size] for size in memories]


def test_both_ends_of_a_memory_are_the_same_pages(ends: tuple[socket.socket, socket.socket]) -> None:
    memory = Memory.of([bytes(10)])
    send(ends[0], {"twice": [memory, memory]})
    one, other = receive(ends[1])["twice"]
    assert one is other
    one.parts()[0][3] = 7
    assert bytes(memory.parts()[0]) == bytes([0, 0, 0, 7, 0, 0, 0, 0, 0, 0])


def test_the_messages_of_several_threads_arrive_whole(ends: tuple[socket.socket, socket.socket]) -> None:
    def tell(thread: int) -> None:
        for number in range(50):
            send(ends[0], (thread, number, np.full(number * 1000, thread)))

    threads = [threading.Thread(target=tell, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    heard = [receive(ends[1]) for _ in range(200)]
    for thread in threads:
        thread.join()
    for thread_number in range(4):
        theirs = [(number, array) for thread, number, array in heard if thread == thread_number]
        assert [number for number, _ in theirs] == list(range(50))
        assert all((array == thread_number).all() and len(array) == number * 1000 for number, array in theirs)


def test_without_a_message_there_is_none_and_at_the_end_no_more(ends: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(BlockingIOError):
        receive(ends[1], wait=False)
    send(ends[0], 1)
    ends[0].close()
    assert receive(ends[1], wait=False) == 1
    with pytest.raises(EOFError):
        receive(ends[1])
    with pytest.raises(OSError, match="Broken pipe"):
        send(ends[1], 1)


def test_without_room_for_open_files_a_message_says_so_and_leaves_none(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    send(ends[0], [Memory.of([b"one"]), Memory.of([b"two"])])
    before, limits = open_files(), resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)  # the lowest number that is free
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, limits[1]))
    try:
        with pytest.raises(OSError, match="ulimit -n"):
            receive(ends[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert open_files() == before


def test_a_message_that_would_need_too_many_open_files_says_so(ends: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(OSError, match="253 large values"):
        send(ends[0], [Memory.of([b""]) for _ in range(254)])


def test_programs_that_a_process_starts_do_not_get_its_memories(ends: tuple[socket.socket, socket.socket]) -> None:
    send(ends[0], Memory.of([b"one"]))
    arrived = receive(ends[1])
    assert not os.get_inheritable(arrived.descriptor)
