"""A cache on disk: never above its bound, never wrong, whatever its users do or suffer."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from offload.pipeline.cache import accounts, space
from offload.pipeline.cache.space import Ledger, entry_bytes
from offload.pipeline.cache.spec import LEDGER, CacheSpec, parse_cache
from offload.pipeline.cache.store import CachedSource, Store, opened
from tests.helpers import eventually, mount_small_disk
from tests.programs.cache_writer import KEYS, content_of, key_of

ROOT = Path(__file__).parents[3]


def spec_of(folder: Path | str, size: str) -> CacheSpec:
    spec = parse_cache("cache", f"ssd:{folder}:{size}")
    assert spec is not None
    return spec


def on_disk(spec: CacheSpec) -> int:
    """The bytes of all contents, finished or not, in blocks of the disk."""
    with Ledger(spec.folder / LEDGER).held():  # nothing moves meanwhile
        paths = [path for name in (space.NEW, space.SOURCES) for path in (spec.folder / name).rglob("*")]
        return sum(
            path.stat().st_blocks * 512
            for path in paths
            if path.is_file() and path.name not in (space.USERS, space.SEARCHED)
        )


def booked(spec: CacheSpec) -> int:
    return int.from_bytes((spec.folder / LEDGER).read_bytes(), "little")


def held(source: CachedSource, number: int, version: int = 1) -> bool:
    found = source.get(key_of(number), version)
    assert found is None or found == content_of(number)
    return found is not None


def has_ended(store: weakref.ref[Store]) -> None:
    """Wait until nobody holds a store, as after the end of its process."""
    eventually(lambda: store() is None)


class Life(RuleBasedStateMachine):
    """Two sources of one folder that store, replace, read, and lose contents, and processes that come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.spec = spec_of(self.folder.name, "300kB")
        self.known: dict[tuple[str, int], tuple[int, bytes]] = {}
        self.sources: dict[str, CachedSource] = {}
        self.again()

    @rule()
    def again(self) -> None:
        if self.sources:
            before = weakref.ref(self.store)
            del self.store
            self.sources.clear()
            has_ended(before)
        self.store = Store(self.spec)
        self.store.joined()
        self.sources = {name: self.store.source(name) for name in ("a", "b")}

    @rule(name=st.sampled_from("ab"), key=st.integers(0, 9), version=st.integers(1, 2), size=st.integers(0, 120_000))
    def put(self, name: str, key: int, version: int, size: int) -> None:
        content = random.Random(size).randbytes(size)
        self.sources[name].put(key_of(key), version, content)
        if self.sources[name].get(key_of(key), version) is not None:
            self.known[name, key] = version, content

    @rule(name=st.sampled_from("ab"), key=st.integers(0, 9), version=st.integers(1, 2))
    def get(self, name: str, key: int, version: int) -> None:
        found = self.sources[name].get(key_of(key), version)
        assert found is None or (version, found) == self.known[name, key]

    @rule(damage=st.sampled_from(["cut", "flip", "empty", "grow"]), choice=st.randoms(use_true_random=False))
    def damage(self, damage: str, choice: random.Random) -> None:
        paths = sorted(path for path in (self.spec.folder / space.SOURCES).rglob("??/*") if path.is_file())
        if not paths:
            return
        path = choice.choice(paths)
        whole = path.read_bytes()
        at = choice.randrange(len(whole))
        flipped = whole[:at] + bytes([whole[at] ^ (1 << choice.randrange(8))]) + whole[at + 1 :]
        # What a damaged disk shows takes as much of it as before.
        same = -(-len(whole) // 4096) * 4096
        path.write_bytes(
            {"cut": whole[:at] or b"0", "flip": flipped, "empty": bytes(len(whole)), "grow": whole + b"x"}[damage]
            if len(whole) < same
            else flipped
        )
        key = path.parent.name + path.name
        version = next(
            v for (name, k), (v, _) in self.known.items() if name == path.parents[1].name and key_of(k) == key
        )
        # A flipped bit of the version looks like another version, which nobody asks for.
        assert self.sources[path.parents[1].name].get(key, version) is None
        assert not path.exists() or damage == "flip"
        self.again()  # counts the damaged file as it is now

    @invariant()
    def is_bounded(self) -> None:
        assert on_disk(self.spec) <= self.spec.limit_bytes
        assert booked(self.spec) == on_disk(self.spec)
        assert not list((self.spec.folder / space.NEW).iterdir())

    def teardown(self) -> None:
        self.folder.cleanup()


def test_it_is_bounded_and_right_whatever_happens() -> None:
    run_state_machine_as_test(Life, settings=settings(max_examples=25, stateful_step_count=25, deadline=None))  # type: ignore[no-untyped-call]


@given(st.integers(5, 60), st.integers(0, 2**32))
@settings(deadline=None, max_examples=15)
def test_a_scan_over_more_than_the_cache_keeps_a_part_that_every_later_pass_finds(entries: int, seed: int) -> None:
    numbers = list(range(entries))
    with tempfile.TemporaryDirectory() as folder:
        spec = spec_of(folder, "250kB")
        source = Store(spec).source("a")
        hits = []
        for epoch in range(4):
            random.Random(seed + epoch).shuffle(numbers)
            source.begin(epoch)
            hits.append(0)
            for number in numbers:
                if held(source, number):
                    hits[-1] += 1
                else:
                    source.put(key_of(number), 1, content_of(number))
            assert on_disk(spec) <= 250_000
        assert hits[0] == 0
        assert hits[1] > 0
        assert hits[1] <= hits[2] <= hits[3]
        if sum(entry_bytes(len(content_of(number))) for number in numbers) <= 250_000:
            assert hits[1] == entries


def fill(source: CachedSource, numbers: range = range(KEYS)) -> None:
    for number in numbers:
        source.put(key_of(number), 1, content_of(number))


def test_a_source_that_nobody_uses_makes_room_and_one_in_use_does_not(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "300kB")
    store = Store(spec)
    first = store.source("first")
    fill(first)
    before = [number for number in range(KEYS) if held(first, number)]
    second = store.source("second")
    fill(second)
    assert [number for number in range(KEYS) if held(first, number)] == before
    smallest = min(entry_bytes(len(content_of(number))) for number in range(KEYS))
    assert sum(held(second, number) for number in range(KEYS)) * smallest <= 300_000 - sum(
        entry_bytes(len(content_of(number))) for number in before
    )
    ended = weakref.ref(first)
    del first
    eventually(lambda: ended() is None)
    store._next_sweep = 0.0
    third = store.source("third")
    fill(third, range(40, KEYS))
    assert any(held(third, number) for number in range(40, KEYS))
    assert booked(spec) == on_disk(spec) <= spec.limit_bytes


def test_contents_that_a_source_no_longer_has_make_room_after_a_whole_pass(tmp_path: Path) -> None:
    """Files were deleted, or renamed, and others came: the new ones find room once a pass has not used the old ones."""
    spec = spec_of(tmp_path, "300kB")
    store = Store(spec)
    fill(store.source("a"))
    ended = weakref.ref(store)
    del store
    has_ended(ended)
    for path in (spec.folder / space.SOURCES).rglob("??/*"):
        os.utime(path, (time.time() - 900, time.time() - 900))
    source = Store(spec).source("a")
    for epoch in (3, 4):
        source.begin(epoch)
        source.put(key_of(1000), 1, bytes(50_000))
        assert source.get(key_of(1000), 1) is None
    source.begin(5)
    source._store._next_sweep = 0.0
    kept = [number for number in range(3) if held(source, number)]  # used in this run
    source.put(key_of(1000), 1, bytes(50_000))
    assert source.get(key_of(1000), 1) == bytes(50_000)
    assert [number for number in range(3) if held(source, number)] == kept
    assert booked(spec) == on_disk(spec) <= spec.limit_bytes


def test_a_smaller_bound_of_a_later_run_holds_at_once(tmp_path: Path) -> None:
    store = Store(spec_of(tmp_path, "300kB"))
    fill(store.source("a"))
    ended = weakref.ref(store)
    del store
    has_ended(ended)
    spec = spec_of(tmp_path, "100kB")
    store = Store(spec)
    store.joined()
    assert 0 < on_disk(spec) == booked(spec) <= 100_000


def test_a_content_larger_than_the_cache_is_not_stored(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "10kB")
    source = Store(spec).source("a")
    source.put(key_of(0), 1, bytes(20_000))
    assert source.get(key_of(0), 1) is None
    assert on_disk(spec) == 0


def writer(spec: CacheSpec, size: str, source: str, rounds: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.programs.cache_writer", str(spec.path), size, source, str(rounds)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_processes_of_a_node_share_a_folder_within_the_bound(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "600kB")
    running = [writer(spec, "600kB", source, 150) for source in "aab"]
    for each in running:
        while each.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.communicate(timeout=0.2)
            if (spec.folder / LEDGER).exists():
                assert on_disk(spec) <= spec.limit_bytes
        assert each.returncode == 0
    assert 0 < on_disk(spec) == booked(spec)
    assert not list((spec.folder / space.NEW).iterdir())
    assert not list((spec.folder / space.BUSY).iterdir())


def test_killed_processes_leave_nothing_wrong_and_nothing_behind(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "600kB")
    draw = random.Random(0)
    for _ in range(4):
        running = [writer(spec, "600kB", "a", 0) for _ in range(2)]
        for each in running:
            assert each.stdout is not None
            assert each.stdout.readline() == "writing\n"
        before = max(on_disk(spec) for _ in range(1 + draw.randrange(10)))  # some work later
        for each in running:
            each.kill()
            each.communicate()
        assert max(before, on_disk(spec)) <= spec.limit_bytes
        assert booked(spec) >= on_disk(spec)
    store = Store(spec)
    store.joined()
    assert not list((spec.folder / space.NEW).iterdir())
    assert not list((spec.folder / space.BUSY).iterdir())
    assert 0 < on_disk(spec) == booked(spec)
    source = store.source("a")
    assert any(held(source, number, version) for number in range(KEYS) for version in (1, 2))


def test_what_a_killed_process_was_writing_makes_room_while_others_go_on(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "100kB")
    store = Store(spec)
    source = store.source("a")
    program = (
        "import sys, time; from offload.pipeline.cache.spec import parse_cache; from offload.pipeline.cache.store import Store\n"
        f"store = Store(parse_cache('cache', 'ssd:{tmp_path}:100kB')); store.joined(); source = store.source('a')\n"
        "with source.alone('f' * 32): store.reserve(81920, source); print('reserved', flush=True); time.sleep(900)"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "reserved\n"
        source.put(key_of(0), 1, bytes(60_000))
        assert source.get(key_of(0), 1) is None  # the other process lives
        other.kill()
    store._next_sweep = 0.0
    with source.alone("f" * 32):  # nobody holds it any more
        source.put(key_of(0), 1, bytes(60_000))
    assert source.get(key_of(0), 1) == bytes(60_000)
    assert booked(spec) == on_disk(spec)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_on_a_full_disk_it_stores_nothing_more_says_so_once_and_still_reads(tmp_path: Path) -> None:
    mount_small_disk(tmp_path, "size=200k")
    try:
        spec = spec_of(tmp_path, "100MB")
        store = opened(spec)
        assert store is not None
        source = store.source("a")
        accounts.collect()
        fill(source)
        assert accounts.collect().problem == f"{tmp_path}: No space left on device"
        fill(source)
        assert accounts.collect().problem is None
        assert not list((spec.folder / space.NEW).iterdir())
        assert booked(spec) == on_disk(spec)
        assert 0 < sum(held(source, number) for number in range(KEYS)) < KEYS
        with source.alone(key_of(KEYS - 1)):
            pass
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_folder_that_cannot_be_used_is_told_once(tmp_path: Path) -> None:
    spec = spec_of(tmp_path / "absent" / "cache", "1MB")
    accounts.collect()
    assert opened(spec) is None
    assert accounts.collect().problem == f"{spec.path}: No such file or directory"
    assert opened(spec) is None
    assert accounts.collect().problem is None


def test_a_content_is_read_from_storage_once_for_all_who_want_it_at_the_same_time(tmp_path: Path) -> None:
    source = Store(spec_of(tmp_path, "1MB")).source("a")
    reads: list[int] = []
    begun = threading.Event()

    def read() -> None:
        begun.set()
        with source.alone(key_of(0)):
            if not held(source, 0):
                reads.append(1)
                source.put(key_of(0), 1, content_of(0))

    with source.alone(key_of(0)):
        threads = [threading.Thread(target=read) for _ in range(8)]
        for thread in threads:
            thread.start()
        begun.wait(800)
        assert reads == []
    for thread in threads:
        thread.join(800)
    assert reads == [1]
    eventually(lambda: not list((tmp_path / "offload-cache" / space.BUSY).iterdir()))
