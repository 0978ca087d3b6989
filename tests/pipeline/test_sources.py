"""Sources: what a user finds in the batches, and what a user is told where a source is not what it should be."""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import json
import os
import pickle
import socket
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import PIL.Image
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ray.data.block import BlockAccessor
from torchvision.transforms import v2

from benchmarks.s3_server import BUCKET, Server, slow_s3
from offload.errors import ConfigError, RunError
from offload.pipeline.blocks.wire import ERROR
from offload.pipeline.describe.sources import as_pipeline, from_torch, webdataset
from offload.pipeline.images.decode import DecodeError, decode_image
from offload.pipeline.index.source import Index, Samples
from offload.pipeline.sources.from_torch import list_torch_dataset
from offload.pipeline.sources.image_folder import list_image_folder
from offload.pipeline.sources.parquet import list_parquet
from offload.pipeline.sources.storage_paths import open_filesystem, open_folder, read_part
from offload.pipeline.sources.webdataset import list_webdataset
from tests.helpers import nobody, open_to_others
from tests.pipeline.index_pass import a_pass, stream_of

RED, GREY = (250, 10, 20), 120


def encoded(color: Any = RED, size: tuple[int, int] = (12, 8), mode: str = "RGB", kind: str = "JPEG") -> bytes:
    out = io.BytesIO()
    PIL.Image.new(mode, size, color).save(out, kind)
    return out.getvalue()


def noise(kind: str, size: int = 24) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8)
    out = io.BytesIO()
    PIL.Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


def make_folder(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def read(index: Index, rows: list[int] | None = None) -> Samples:
    """Rows as a task gets them: the reader has travelled."""
    reader = pickle.loads(pickle.dumps(index.reader))
    samples: Samples = reader.read(index.table.take(pa.array(rows if rows is not None else range(len(index)))))
    return samples


def refusal(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- decoding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "want"),
    [
        (encoded(), RED),
        (encoded(kind="PNG"), RED),
        (encoded(kind="BMP"), RED),
        (encoded(kind="WEBP"), RED),
        (encoded(kind="TIFF"), RED),
        (encoded(kind="PPM"), RED),
        (encoded(GREY, mode="L"), (GREY,) * 3),
        (encoded(GREY, mode="L", kind="PNG"), (GREY,) * 3),
        (encoded((*RED, 128), mode="RGBA", kind="PNG"), RED),
        (encoded((0, 255, 255, 0), mode="CMYK"), (255, 0, 0)),
    ],
    ids=["jpeg", "png", "bmp", "webp", "tiff", "ppm", "grey jpeg", "grey png", "rgba png", "cmyk jpeg"],
)
def test_every_kind_of_image_becomes_hwc_uint8_rgb(data: bytes, want: tuple[int, int, int]) -> None:
    pixels = decode_image(data)
    assert pixels.shape == (8, 12, 3)
    assert pixels.dtype == np.uint8
    assert np.abs(pixels.astype(int) - want).max() <= 12  # JPEG and WebP are lossy
    pixels[:4] = 0  # a transform may write to the images of its samples


def grey(values: Sequence[float], dtype: str, kind: str) -> bytes:
    buffer = io.BytesIO()
    PIL.Image.fromarray(np.array([values], dtype)).save(buffer, kind)
    return buffer.getvalue()


DEEP = [0, 255, 256, 20_000, 65_535]


@pytest.mark.parametrize(
    "data",
    [
        grey(DEEP, "uint16", "PNG"),
        grey(DEEP, "uint16", "TIFF"),
        b"P5\n5 1\n65535\n" + np.array(DEEP, ">u2").tobytes(),
    ],
    ids=["png", "tiff", "pgm"],
)
def test_grey_pixels_of_16_bits_keep_their_upper_8_as_those_of_colours_do(data: bytes) -> None:
    assert decode_image(data).tolist() == [[[value >> 8] * 3 for value in DEEP]]


@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_pixels_of_32_bits_are_refused_where_8_bits_would_lose_them(dtype: str) -> None:
    assert decode_image(grey([0, 7, 255], dtype, "TIFF")).tolist() == [[[0] * 3, [7] * 3, [255] * 3]]
    for values in ([0, 256], [-1, 0], [0.5, 1] if dtype == "float32" else [70_000]):
        with pytest.raises(DecodeError, match=r"8 bits cannot hold its pixels of 32 bits\. Convert it"):
            decode_image(grey(values, dtype, "TIFF"))


def test_decoding_agrees_with_pillow() -> None:
    data = noise("JPEG", 64)
    want = np.asarray(PIL.Image.open(io.BytesIO(data)).convert("RGB")).astype(int)
    assert np.abs(decode_image(data) - want).max() <= 2


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "the file is empty"),
        (b"<html>not found</html>", "cannot identify image file"),
        (noise("JPEG")[:400], "Truncated"),
        (noise("JPEG")[:-200], "truncated"),
        (noise("PNG")[:400], "truncated"),
        (b"\xff\xd8\xff", "."),
        (noise("JPEG")[:200] + b"\0" * 400, "."),
    ],
    ids=["empty", "html", "jpeg header", "truncated jpeg", "truncated png", "three bytes", "zeros"],
)
def test_what_is_no_whole_image(data: bytes, says: str) -> None:
    with pytest.raises(DecodeError, match=says):
        decode_image(data)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.sampled_from(["JPEG", "PNG", "WEBP", "BMP", "TIFF", "PPM", "GIF"]),
    cut=st.integers(0, 3000),
    flips=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), max_size=4),
)
def test_broken_bytes_never_raise_anything_else(kind: str, cut: int, flips: list[tuple[int, int]]) -> None:
    data = bytearray(noise(kind))
    for at, value in flips:
        data[at % len(data)] = value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            pixels = decode_image(bytes(data[:cut] if cut else data))
        except DecodeError:
            return
    assert pixels.dtype == np.uint8
    assert pixels.shape[2] == 3


# --- image_folder -----------------------------------------------------------------------------------------------------


@pytest.fixture
def animals(tmp_path: Path) -> Path:
    return make_folder(
        tmp_path / "animals",
        {
            "dog/b.jpg": encoded(),
            "dog/a.JPG": encoded(),
            "cat/x.png": encoded(GREY, mode="L", kind="PNG"),
            "cat/deep/er/y.jpeg": encoded(),
            "ant/1.webp": encoded(kind="WEBP"),
            "dog/notes.txt": b"no image",
            "dog/.hidden.jpg": b"",
            ".ipynb_checkpoints/a.jpg": encoded(),
            "cat/.thumbnails/x.jpg": encoded(),
            "classes.json": b"{}",
        },
    )


def test_labels_are_the_classes_in_sorted_order(animals: Path) -> None:
    index = list_image_folder(animals)
    assert index.classes == ("ant", "cat", "dog")
    assert len(index) == 5
    paths = [os.path.relpath(os.fsdecode(p), animals) for p in index.table.column("path").to_pylist()]
    assert paths == ["ant/1.webp", "cat/deep/er/y.jpeg", "cat/x.png", "dog/a.JPG", "dog/b.jpg"]
    samples = read(index)
    assert samples.errors == {}
    assert list(samples.columns["label"]) == [0, 1, 1, 2, 2]
    assert np.asarray(samples.columns["label"]).dtype == np.int64
    assert [image.shape for image in samples.columns["image"]] == [(8, 12, 3)] * 5
    assert index.reader.describe(index.table, 3) == str(animals / "dog/a.JPG")


def test_ids_do_not_depend_on_how_the_path_is_written(animals: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = list_image_folder(animals).table
    monkeypatch.chdir(animals.parent)
    monkeypatch.setenv("HOME", str(animals.parent))
    for path in ("animals", "./animals/", f"{animals}/", "~/animals", f"file://{animals}", animals):
        assert list_image_folder(path).table.equals(want)
    for path in ("animals", "./animals/", "~/animals"):
        assert list_image_folder(path, filesystem=pafs.LocalFileSystem()).table.equals(want)


def test_rows_in_any_order(animals: Path) -> None:
    samples = read(list_image_folder(animals), [4, 0])
    assert list(samples.columns["label"]) == [2, 0]


def test_names_of_images_and_classes_need_not_be_text(tmp_path: Path) -> None:
    make_folder(tmp_path, {os.fsdecode(b"caf\xe9/\xff.jpg"): encoded(), os.fsdecode(b"caf\xe9/bad\xff.jpg"): b"?"})
    index = list_image_folder(tmp_path)
    assert index.classes == (r"caf\xe9",)
    assert list(read(index).errors) == [0]
    assert index.reader.describe(index.table, 0) == f"{tmp_path}/caf\\xe9/bad\\xff.jpg"


def test_class_folders_may_be_links(animals: Path, tmp_path: Path) -> None:
    links = tmp_path / "subset"
    links.mkdir()
    (links / "dog").symlink_to(animals / "dog")
    (links / "cat").symlink_to(animals / "cat")
    (links / "cat2").mkdir()
    (links / "cat2" / "one.png").symlink_to(animals / "cat" / "x.png")
    (links / "cat2" / "up").symlink_to(links)  # a link that leads back ends nowhere
    index = list_image_folder(links)
    assert index.classes == ("cat", "cat2", "dog")
    assert len(index) == 5
    assert read(index).errors == {}


def test_files_that_cannot_be_decoded_are_errors_of_their_own_samples(animals: Path) -> None:
    (animals / "dog" / "b.jpg").write_bytes(noise("JPEG")[:300])
    (animals / "cat" / "x.png").write_bytes(b"")
    (animals / "ant" / "1.webp").unlink()
    index = list_image_folder(animals)
    (animals / "dog" / "a.JPG").unlink()  # after it was listed
    samples = read(index)
    assert sorted(samples.errors) == [1, 2, 3]
    assert samples.errors[1] == "corrupt or truncated image: the file is empty"
    assert samples.errors[2] == "cannot be read: No such file or directory"
    assert "truncated" in samples.errors[3]
    assert [image is None for image in samples.columns["image"]] == [False, True, True, True]
    assert len(samples.columns["label"]) == 4


def test_folders_that_are_not_as_expected(animals: Path, tmp_path: Path) -> None:
    assert "does not exist" in refusal(list_image_folder, tmp_path / "nowhere")
    assert "is a file, not a folder" in refusal(list_image_folder, animals / "classes.json")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert f"no images under '{empty}' (0 other files)" in refusal(list_image_folder, empty)
    make_folder(empty, {"a/notes.txt": b"", "a/more.csv": b""})
    text = refusal(list_image_folder, empty)
    assert "(2 other files)" in text
    assert ".jpg" in text


def test_images_outside_class_folders(tmp_path: Path) -> None:
    flat = make_folder(tmp_path, {"a/1.jpg": encoded(), "2.jpg": encoded()})
    text = refusal(list_image_folder, flat)
    assert "2.jpg' is not in a class folder" in text
    assert "<class>/<name>" in text


def as_nobody(path: Path) -> str:
    """What a user without rights is told about a path."""
    lister = list_parquet if path.suffix == ".parquet" else list_image_folder
    with nobody():
        try:
            index = lister(str(path))
            return str(index.reader.read(index.table).errors)
        except ConfigError as error:
            return str(error)


@pytest.mark.skipif(os.geteuid() != 0, reason="drops root's rights, which only root can")
def test_paths_without_permission(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "data", {"a/1.jpg": encoded(), "b/2.jpg": encoded(), "t.parquet": b""})
    open_to_others(root)
    for path in (root, root / "t.parquet"):
        with contextlib.suppress(ConfigError):  # imports what it needs, as root
            (list_parquet if path.suffix == ".parquet" else list_image_folder)(str(path))
    assert as_nobody(root) == "{}"
    (root / "a/1.jpg").chmod(0)
    assert as_nobody(root) == "{0: 'cannot be read: Permission denied'}"
    (root / "t.parquet").chmod(0)
    text = as_nobody(root / "t.parquet")
    assert "cannot read" in text
    assert "Permission denied" in text
    (root / "b").chmod(0)
    text = as_nobody(root)
    assert f"no permission to read '{root / 'b'}'" in text
    assert "chmod" in text
    root.chmod(0)
    assert f"no permission to read '{root}'" in as_nobody(root)
    assert f"cannot read '{root / 't.parquet'}'" in as_nobody(root / "t.parquet")
    assert "no permission to read" in as_nobody(root / "b")  # not "does not exist"


# --- remote file systems ----------------------------------------------------------------------------------------------


def write_remote(fs: Any, root: str) -> None:
    for name, data in {
        "train/dog/a b.jpg": encoded(),
        "train/cat/x.png": encoded(kind="PNG"),
        "train/cat/._x.png": b"left behind by a Mac",
        "train/.cache/y.png": encoded(kind="PNG"),
        "train/dog/bad.jpg": b"\xff\xd8nothing",
        "my data/#1, ü/cat/100%20.jpg": encoded(),
    }.items():
        with fs.open(f"{root}/{name}", "wb") as file:
            file.write(data)
    for number in range(2):
        with fs.open(f"{root}/table/{number}.parquet", "wb") as file:
            pq.write_table(pa.table({"x": [number * 2, number * 2 + 1]}), file, row_group_size=1)


def check_remote_folder(index: Index) -> None:
    assert index.classes == ("cat", "dog")
    samples = read(index)
    assert list(samples.columns["label"]) == [0, 1, 1]
    assert list(samples.errors) == [2]
    assert samples.columns["image"][0].shape == (8, 12, 3)


def test_fsspec_by_its_scheme_and_as_an_object() -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    write_remote(fs, "/bucket")
    for path, filesystem in (
        ("memory://bucket/train", None),
        ("memory://bucket/train/", None),
        ("memory://bucket/train", fs),
        ("/bucket/train", fs),
        ("bucket/train", fs),
    ):
        check_remote_folder(list_image_folder(path, filesystem=filesystem))
    table = list_parquet("memory://bucket/table")
    assert list(read(table).columns["x"]) == [0, 1, 2, 3]
    assert "does not exist" in refusal(list_image_folder, "memory://bucket/nowhere")


def subtree(folder: Path) -> Any:
    return pafs.SubTreeFileSystem(str(folder), pafs.LocalFileSystem())


def dirfs(folder: Path) -> Any:
    import fsspec
    from fsspec.implementations.dirfs import DirFileSystem

    return DirFileSystem(str(folder), fsspec.filesystem("file"))


@pytest.mark.parametrize("make", [subtree, dirfs])
def test_a_folder_may_be_the_root_of_its_file_system(animals: Path, hive: Path, make: Callable[[Path], Any]) -> None:
    """Classes, hidden folders and Hive's columns have the same names, however the file system writes its paths."""
    want = read(list_image_folder(animals)).columns["label"]
    for path, fs in (
        ("/", make(animals)),
        ("", make(animals)),
        ("/animals", make(animals.parent)),
        ("animals/", make(animals.parent)),
    ):
        index = list_image_folder(path, filesystem=fs)
        assert index.classes == ("ant", "cat", "dog")
        assert list(read(index).columns["label"]) == list(want)
    for path, fs in (("/", make(hive)), ("", make(hive)), ("/t", make(hive.parent))):
        assert [*read(list_parquet(path, filesystem=fs)).columns] == ["x", "own", "y", "c"]


def test_the_root_of_this_machine_is_a_folder() -> None:
    assert open_folder("/")[1] == "/"


ODD_NAMES = ["with space", "ünï", "50%", "ha#sh", "q?m", "br[1]", "a, b;c", "col:on", "{x}", "a+b=c&d"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_uris_may_hold_what_paths_may_hold(tmp_path: Path, name: str) -> None:
    root = make_folder(tmp_path / name, {f"cat/{name}.jpg": encoded()})
    index = list_image_folder(f"file://{root}")
    assert index.reader.describe(index.table, 0) == str(root / "cat" / f"{name}.jpg")
    assert read(index).errors == {}
    add_members(root / "100%20.tar", {"a.cls": b"7"})  # a listed name is no URI
    assert list(read(list_webdataset(f"file://{root}")).columns["label"]) == [7]


def test_escapes_and_options_of_uris_stay(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "a b", {"cat/x.jpg": encoded()})
    assert list_image_folder(root.as_uri()).classes == ("cat",)
    fs, path = open_filesystem("s3://bucket/my data/a?b?region=eu-west-1&scheme=http")
    assert (fs.region, path) == ("eu-west-1", "bucket/my data/a?b")
    assert open_filesystem("gs://anonymous@bucket/my data/x")[1] == "bucket/my data/x"


def test_schemes_that_nobody_knows() -> None:
    text = refusal(list_image_folder, "nonsense://bucket/train")
    assert "cannot open 'nonsense://bucket/train'" in text
    assert "s3://" in text


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A real S3 server, reached over HTTP as AWS is."""
    import boto3
    import fsspec
    from moto.server import ThreadedMotoServer

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = ThreadedMotoServer("127.0.0.1", port, verbose=False)
    server.start()
    url = f"http://127.0.0.1:{port}"
    for name, value in {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", endpoint_url=url, region_name="us-east-1")
    client.create_bucket(Bucket="bucket")
    local = fsspec.filesystem("memory")
    write_remote(local, "/staged")
    for path in local.find("/staged"):
        client.put_object(Bucket="bucket", Key=path.removeprefix("/staged/"), Body=local.cat(path))
    client.close()
    try:
        yield server
    finally:
        server.stop()


@pytest.mark.usefixtures("s3")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_s3() -> None:
    for path in ("s3://bucket/train", "s3://bucket/train/"):
        check_remote_folder(list_image_folder(path))
    table = list_parquet("s3://bucket/table")
    assert list(read(table).columns["x"]) == [0, 1, 2, 3]
    assert list(read(list_parquet("s3://bucket/table/1.parquet")).columns["x"]) == [2, 3]
    assert "'s3://bucket/nowhere' does not exist" in refusal(list_image_folder, "s3://bucket/nowhere")
    assert "s3://absent/train" in refusal(list_image_folder, "s3://absent/train")
    assert "cannot read" in refusal(list_parquet, "s3://bucket/absent.parquet")
    assert read(list_image_folder("s3://bucket/my data/#1, ü")).errors == {}
    shard = io.BytesIO()
    with tarfile.open(fileobj=shard, mode="w") as tar:
        member = tarfile.TarInfo("a.cls")
        member.size = 1
        tar.addfile(member, io.BytesIO(b"7"))
    fs, _ = open_filesystem("s3://bucket/shards")
    with fs.open_output_stream("bucket/shards/0.tar") as sink:
        sink.write(shard.getvalue())
    for shards in ("s3://bucket/shards/0.tar", "s3://bucket/shards/{0..0}.tar?region=us-east-1"):
        assert list(read(list_webdataset(shards)).columns["label"]) == [7]
    for pattern in ("s3://bucket/absent/*.tar", "s3://bucket/t*/*.tar"):
        assert f"no *.tar shards under '{pattern}'" in refusal(list_webdataset, pattern)


@pytest.fixture(scope="module")
def counting_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An S3 server that counts its requests: three images in `train`, and two shards with two samples each in `tars`."""
    folder = tmp_path_factory.mktemp("server")
    make_folder(folder / BUCKET / "train", {f"cat/{i}.jpg": encoded() for i in range(3)})
    (folder / BUCKET / "tars").mkdir()
    for shard in range(2):
        members = {f"{i}.{name}": b"7" * (i + 1) for i in range(2) for name in ("cls", "txt")}
        add_members(folder / BUCKET / "tars" / f"{shard}.tar", members)
    with slow_s3(folder, 0.0, min(os.sched_getaffinity(0))) as server:
        yield server


def through_s3fs(url: str) -> Any:
    import s3fs

    return s3fs.S3FileSystem(endpoint_url=url, key="a", secret="b", skip_instance_cache=True)


def through_obstore(url: str) -> Any:
    from obstore.fsspec import FsspecStore

    return FsspecStore(
        "s3", endpoint=url, access_key_id="a", secret_access_key="b", region="us-east-1",
        client_options={"allow_http": True}, skip_instance_cache=True,
    )  # fmt: skip


@pytest.mark.parametrize("through", [through_s3fs, through_obstore])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_file_system_of_fsspec_reads_a_file_in_one_request(counting_s3: Server, through: Any) -> None:
    fs = through(counting_s3.url)
    images = list_image_folder(f"{BUCKET}/train", filesystem=fs)
    shards = list_webdataset(f"{BUCKET}/tars", filesystem=fs)
    for index, requests in ((images, 3), (shards, 4)):
        before = counting_s3.requests()
        samples = read(index)
        assert samples.errors == {}
        assert len(samples.columns["label"]) == requests
        made = {name: count - before[name] for name, count in counting_s3.requests().items()}
        assert made == {"HEAD": 0, "GET": requests, "LIST": 0}
    assert list(read(shards).columns["txt"]) == ["7", "77"] * 2
    assert list_webdataset(f"{BUCKET}/tars/*.tar", filesystem=fs).table.equals(shards.table)


def test_storage_that_refuses_is_told_with_the_remedy() -> None:
    import fsspec

    class Refusing(fsspec.get_filesystem_class("memory")):  # type: ignore[misc]
        def info(self, path: str, **given: Any) -> Any:
            raise PermissionError("403 Forbidden")

    for lister, path in (
        (list_image_folder, "bucket/train"),
        (list_parquet, "bucket/table"),
        (list_parquet, "bucket/table.parquet"),
        (list_webdataset, "bucket/tars"),
        (list_webdataset, "bucket/0.tar"),
        (list_webdataset, "bucket/*.tar"),
    ):
        text = refusal(lister, path, filesystem=Refusing(skip_instance_cache=True))
        assert path in text
        assert "403 Forbidden" in text


def test_a_server_that_ignores_ranges_sends_no_wrong_bytes() -> None:
    import fsspec

    class Whole(fsspec.get_filesystem_class("memory")):  # type: ignore[misc]
        """As the file system of HTTP is, in front of such a server."""

        def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> Any:
            return super().cat_file(path, **options)

    fs = Whole(skip_instance_cache=True)
    fs.pipe("/whole/a.bin", b"0123456789")
    known = pafs.PyFileSystem(pafs.FSSpecHandler(fs))
    assert read_part(known, "/whole/a.bin", 3, 4) == b"3456"
    assert read_part(known, "/whole/a.bin", 8, 4) == b"89"


# --- from_torch -------------------------------------------------------------------------------------------------------


class Pairs(torch.utils.data.Dataset[Any]):
    """(image, label), the image of any kind."""

    classes = ("even", "odd")

    def __init__(self, kind: str = "pil", size: int = 6) -> None:
        self.kind, self.size = kind, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Any:
        if self.kind == "pil":
            return PIL.Image.new("RGB", (4, 3), (i, 0, 0)), i % 2
        if self.kind == "tensor":
            return torch.full((3, 2, 2), float(i)), torch.tensor(i)
        if self.kind == "dict":
            return {"pixels": np.full((2, 2), i), "name": f"n{i}", "weight": i / 2}
        if self.kind == "one":
            return np.full(2, i)
        return i, i, i


class Batched(Pairs):
    def __getitems__(self, items: list[int]) -> list[Any]:
        assert isinstance(items, list)
        return [(np.full(2, i), i + 100) for i in items]


def test_tuples_of_pil_images_and_numbers() -> None:
    index = list_torch_dataset(Pairs())
    assert (len(index), index.classes, index.name) == (6, ("even", "odd"), "from_torch(Pairs)")
    samples = read(index, [5, 2])
    assert list(samples.columns) == ["image", "label"]
    assert [image[0, 0].tolist() for image in samples.columns["image"]] == [[5, 0, 0], [2, 0, 0]]
    assert samples.columns["image"][0].shape == (3, 4, 3)
    assert samples.columns["image"][0].dtype == np.uint8
    samples.columns["image"][0][:] = 0  # a transform may write to it
    assert list(samples.columns["label"]) == [1, 0]
    assert index.reader.describe(index.table, 5) == "item 5 of Pairs"


def test_images_for_a_transform_of_images_stay_as_they_are() -> None:
    for data in (Pairs(), Pairs("tensor"), [{"image": np.zeros((2, 2)), "label": 1}]):
        image = read(list_torch_dataset(data, images=True), [0]).columns["image"][0]
        want: Any = data[0]
        assert type(image) is type(want["image"] if isinstance(want, dict) else want[0])
    labels: Any = [(i, PIL.Image.new("L", (2, 2))) for i in range(2)]
    assert type(read(list_torch_dataset(labels, images=True)).columns["label"][0]) is np.ndarray


def test_tensors_keep_their_layout() -> None:
    samples = read(list_torch_dataset(Pairs("tensor")), [3])
    assert samples.columns["image"][0].shape == (3, 2, 2)
    assert samples.columns["label"][0] == 3


def test_dicts_name_their_own_columns() -> None:
    samples = read(list_torch_dataset(Pairs("dict"), ["ignored"]), [4])
    assert list(samples.columns) == ["pixels", "name", "weight"]
    assert (samples.columns["name"], samples.columns["weight"]) == (["n4"], [2.0])


def test_one_value_is_one_column() -> None:
    assert list(read(list_torch_dataset(Pairs("one"), ["x"])).columns) == ["x"]


def test_getitems_is_preferred() -> None:
    assert list(read(list_torch_dataset(Batched()), [1, 3]).columns["label"]) == [101, 103]


def test_a_class_may_take_getitems_back_as_with_torch() -> None:
    class Halves(Batched):
        __getitems__ = None  # type: ignore[assignment]

    index = list_torch_dataset(Halves("tensor"))
    assert [int(label) for label in index.reader.read(index.table).columns["label"]] == list(range(6))


def test_subsets_and_concatenations() -> None:
    subset: Any = torch.utils.data.Subset(torch.utils.data.ConcatDataset([Pairs(size=3), Pairs(size=3)]), [4, 0])
    assert list(read(list_torch_dataset(subset)).columns["label"]) == [1, 0]
    wrapped = torch.utils.data.TensorDataset(torch.arange(3), torch.arange(3) * 2)
    assert list(read(list_torch_dataset(wrapped, ["x", "y"])).columns["y"]) == [0, 2, 4]


class Graph:
    """As torch_geometric.data.Data: it has methods of a tensor, and is none."""

    __module__ = "torch_geometric.data.data"

    def detach(self) -> Graph:
        return self


def test_objects_of_packages_named_after_torch_stay_as_they_are() -> None:
    sample = {"graph": Graph(), "size": torch.Size([2, 3]), "device": torch.device("cpu")}
    index = list_torch_dataset([sample])
    assert index.reader.read(index.table).columns == {name: [value] for name, value in sample.items()}


def test_names_for_fewer_values_than_there_are() -> None:
    with pytest.raises(RunError, match=r"returned 3 values, and columns=\('image', 'label'\) names 2.*columns="):
        read(list_torch_dataset(Pairs("three")))


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class StreamWithLength(Stream):
    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize("dataset", [Stream(), StreamWithLength(), iter([1]), 7])
def test_only_map_style(dataset: Any) -> None:
    text = refusal(list_torch_dataset, dataset)
    assert "map-style" in text
    assert type(dataset).__name__ in text
    assert "offload.webdataset" in text


def test_an_empty_data_set() -> None:
    assert refusal(list_torch_dataset, Pairs(size=0)) == "from_torch(Pairs) is empty: len() is 0."


def test_what_datasets_may_hold() -> None:
    pipeline = from_torch(Pairs())
    assert as_pipeline("train", pipeline) is pipeline
    assert as_pipeline("train", Pairs()).name == "from_torch(Pairs)"
    assert as_pipeline("train", [{"x": 1.0}, {"x": 2.0}]).name == "from_torch(list)"
    assert as_pipeline("train", ((1, 2), (3, 4))).name == "from_torch(tuple)"
    text = refusal(as_pipeline, "train", [pipeline, pipeline])
    assert "offload.mix" in text
    for other in ("s3://bucket/train", b"train", Pairs, lambda: Pairs(), {"a": 1}, 5):
        text = refusal(as_pipeline, "train", other)
        assert "datasets['train'] is a " in text
        assert "offload.image_folder" in text


def test_a_table_gives_columns_where_a_data_set_gives_samples() -> None:
    frame = pd.DataFrame(np.zeros((3, 3)))  # of which item 0 is a column
    for table, remedy in ((frame, "from_pandas"), (pa.table({"x": [1, 2]}), "from_arrow")):
        for call in (from_torch, functools.partial(as_pipeline, "train")):
            text = refusal(call, table)
            assert f"a {type(table).__name__} gives columns" in text
            assert f"ray.data.{remedy}(table)" in text


# --- parquet ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    root = tmp_path / "tables"
    (root / "more").mkdir(parents=True)
    for number, name in enumerate(["a.parquet", "more/b.parquet"]):
        ids = list(range(number * 5, number * 5 + 5))
        table = pa.table(
            {
                "id": ids,
                "text": [f"t{i}" for i in ids],
                "vector": [[i, i + 1] for i in ids],
                "tokens": [list(range(i + 1)) for i in ids],
                "picture": [encoded((i * 20, 0, 0), kind="PNG") for i in ids],
                "hf": [{"bytes": encoded((i * 20, 0, 0), kind="PNG"), "path": None} for i in ids],
            }
        )
        pq.write_table(table, root / name, row_group_size=2)
    (root / "_SUCCESS").write_text("")
    return root


def test_all_row_groups_of_all_files(tables: Path) -> None:
    index = list_parquet(tables)
    assert len(index) == 10
    assert index.groups is not None
    assert index.groups.tolist() == [0, 0, 1, 1, 2, 3, 3, 4, 4, 5]
    samples = read(index)
    assert list(samples.columns["id"]) == list(range(10))
    assert list(samples.columns["text"]) == [f"t{i}" for i in range(10)]
    assert np.array_equal(samples.columns["vector"], [[i, i + 1] for i in range(10)])
    assert index.reader.describe(index.table, 6) == f"row 1 of row group 0 of {tables / 'more/b.parquet'}"
    shuffled = read(index, [9, 0, 5, 5])
    assert list(shuffled.columns["id"]) == [9, 0, 5, 5]


def test_lists_of_different_lengths_are_for_the_transform_to_pad(tables: Path) -> None:
    tokens = read(list_parquet(tables, columns=["tokens"]), [0, 3]).columns["tokens"]
    assert [row.tolist() for row in tokens] == [[0], [0, 1, 2, 3]]


LISTS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "lists of one length": (pa.list_(pa.float32()), [[0.1, 0.2], [0.3, 0.4]]),
    "lists of different lengths": (pa.list_(pa.float32()), [[0.1], [], [0.3, 0.4]]),
    "bytes": (pa.list_(pa.uint8()), [[1, 255], [3, 4]]),
    "large lists": (pa.large_list(pa.float16()), [[np.float16(1), np.float16(2)], [np.float16(3)]]),
    "lists of a fixed size": (pa.list_(pa.int32(), 3), [[1, 2, 3], [4, 5, 6]]),
    "bits": (pa.list_(pa.bool_()), [[True, False], [False]]),
    "boxes": (pa.list_(pa.list_(pa.float32(), 4)), [[[1, 2, 3, 4]], [[5, 6, 7, 8], [9, 10, 11, 12]]]),
    "matrices": (pa.list_(pa.list_(pa.int8())), [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]),
}


@pytest.mark.parametrize("case", LISTS)
def test_lists_keep_the_type_of_their_numbers(tmp_path: Path, case: str) -> None:
    kind, rows = LISTS[case]
    pq.write_table(pa.table({"x": pa.array([rows[0], *rows], kind)}), tmp_path / "x.parquet")
    of = kind.value_type if pa.types.is_primitive(kind.value_type) else kind.value_type.value_type
    found = read(list_parquet(tmp_path), list(range(1, len(rows) + 1))).columns["x"]
    for got, row in zip(found, rows, strict=True):
        want = np.array(row, of.to_pandas_dtype())
        assert (got.dtype, got.tolist()) == (want.dtype, want.tolist())
        got[:1] = 0  # a transform may write to its samples


VIEW = pa.string_view()


def writes_views() -> bool:
    """Return whether this pyarrow writes views to Parquet files."""
    try:
        pq.write_table(pa.table({"x": pa.array([], VIEW)}), io.BytesIO())
    except pa.ArrowNotImplementedError:
        return False
    return True


needs_views = pytest.mark.skipif(not writes_views(), reason="this pyarrow writes no views to Parquet files")


@needs_views
def test_views_of_text_and_bytes_are_text_and_bytes(tmp_path: Path) -> None:
    """As DataFusion and delta-rs write them, beside a file of another program."""
    views = {"name": pa.array(["a", None], pa.string_view()), "data": pa.array([b"x", b"y"], pa.binary_view())}
    pq.write_table(pa.table(views), tmp_path / "a.parquet")
    pq.write_table(pa.table({"name": ["b"], "data": [b"z"]}), tmp_path / "b.parquet")
    columns = read(list_parquet(tmp_path), [2, 0, 1]).columns
    assert columns == {"name": ["b", "a", None], "data": [b"z", b"x", b"y"]}


@needs_views
@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([["a", "b"], ["c"]], pa.list_(VIEW)),
        ([["a", "b"], None], pa.large_list(VIEW)),
        ([[b"a"], [b"b"]], pa.list_(pa.binary_view(), 1)),
        ([{"name": "a"}, {"name": None}], pa.struct([("name", VIEW)])),
    ],
)
def test_views_within_lists_and_structs_are_text_and_bytes_too(tmp_path: Path, values: list[Any], kind: Any) -> None:
    pq.write_table(pa.table({"x": pa.array(values, kind)}), tmp_path / "a.parquet")
    assert read(list_parquet(tmp_path), [1, 0]).columns["x"] == values[::-1]


def test_lists_that_are_no_arrays_stay_lists(tmp_path: Path) -> None:
    columns = {
        "gap": [[1, None], [2, 3]],
        "none": [None, [1]],
        "polygons": [[[1, 2], [3]], [[4]]],
        "words": [["a"], []],
    }
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    found = read(list_parquet(tmp_path)).columns
    assert {name: list(map(repr, found[name])) for name in columns} == {
        n: list(map(repr, c)) for n, c in columns.items()
    }


def test_only_the_columns_asked_for(tables: Path) -> None:
    index = list_parquet(tables, columns=["text"], images=["picture"])
    assert list(read(index, [1]).columns) == ["text", "picture"]
    text = refusal(list_parquet, tables, columns=["id", "lable"])
    assert "has no column 'lable'" in text
    assert "id, text, vector" in text
    assert "has no column 'img'" in refusal(list_parquet, tables, images=["img"])


@pytest.mark.parametrize("column", ["picture", "hf"])
def test_columns_of_encoded_images(tables: Path, column: str) -> None:
    images = read(list_parquet(tables, columns=[], images=[column]), [2, 7]).columns[column]
    assert [image[0, 0].tolist() for image in images] == [[40, 0, 0], [140, 0, 0]]


def test_broken_and_missing_images(tmp_path: Path) -> None:
    rows = [{"bytes": encoded()}, {"bytes": None}, None, {"bytes": encoded()[:100]}]
    pq.write_table(pa.table({"image": rows, "label": [1, 2, 3, 4]}), tmp_path / "x.parquet")
    samples = read(list_parquet(tmp_path / "x.parquet", images=["image"]))
    assert sorted(samples.errors) == [1, 2, 3]
    assert "the column holds nothing" in samples.errors[1]
    assert "corrupt or truncated" in samples.errors[3]
    pq.write_table(pa.table({"image": [encoded(), None]}), tmp_path / "y.parquet")
    assert list(read(list_parquet(tmp_path / "y.parquet", images=["image"])).errors) == [1]


def test_a_folder_named_like_a_file(tables: Path) -> None:
    # Spark, Dask and Ray write these.
    folder = tables.rename(tables.with_name("out.parquet"))
    assert len(list_parquet(folder)) == 10


def test_a_file_of_any_name(tables: Path) -> None:
    import fsspec

    want = list(read(list_parquet(tables / "a.parquet")).columns["id"])
    other = (tables / "a.parquet").rename(tables / "a.pq")
    memory = fsspec.filesystem("memory")
    memory.pipe({f"/named/{name}": other.read_bytes() for name in ("part-0", "a.parquet?signature=1")})
    for path in (other, f"file://{other}", "memory://named/part-0", "memory://named/a.parquet?signature=1"):
        assert list(read(list_parquet(path)).columns["id"]) == want
    assert [*read(list_parquet(tables)).columns["id"]] == list(range(5, 10)), "below a folder, the name tells"
    (tables / "rows.csv").write_text("id\n1\n")
    assert "rows.csv' as Parquet" in refusal(list_parquet, tables / "rows.csv")


def test_logs_and_leftovers_beside_a_table_hold_no_rows_of_it(tmp_path: Path) -> None:
    for name in ("t/a.parquet", "t/_delta_log/9.checkpoint.parquet", "t/_temporary/0/b.parquet", "t/_day=1/c.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"x": [name]}), tmp_path / name)
    assert list(read(list_parquet(tmp_path / "t")).columns["x"]) == ["t/_day=1/c.parquet", "t/a.parquet"]
    assert list(read(list_parquet(tmp_path / "t/_temporary")).columns["x"]) == ["t/_temporary/0/b.parquet"]


def test_files_whose_columns_come_in_another_order(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1], "b": ["x"]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"b": ["y"], "a": [2]}), tmp_path / "1.parquet")
    samples = read(list_parquet(tmp_path))
    assert (list(samples.columns["a"]), list(samples.columns["b"])) == ([1, 2], ["x", "y"])


DIFFERING: dict[str, tuple[pa.Array, pa.Array, Any]] = {
    "integers and floats": (pa.array([1, 2]), pa.array([0.5, np.nan]), np.float64),
    "sizes of integers": (pa.array([1, 2], pa.int8()), pa.array([300, 4], pa.int64()), np.int64),
    "text and large text": (pa.array(["a", "b"]), pa.array(["c", "d"], pa.large_string()), str),
    "text and categories": (pa.array(["a", "b"]), pa.array(["c", "d"]).dictionary_encode(), str),
    "categories of numbers": (pa.array([1, 2]).dictionary_encode(), pa.array([3, 1]).dictionary_encode(), np.int64),
    "lists": (pa.array([[1], [2]]), pa.array([[0.5], [1.5]], pa.list_(pa.float32())), np.float64),
    "empty lists": (pa.array([[], []], pa.list_(pa.null())), pa.array([[0.5], [1.5]]), np.float64),
}


@pytest.mark.parametrize("case", DIFFERING)
def test_files_whose_columns_differ_in_type(tmp_path: Path, case: str) -> None:
    one, other, kind = DIFFERING[case]
    for number, values in enumerate((one, other)):
        pq.write_table(pa.table({"x": values}), tmp_path / f"{number}.parquet")
    index = list_parquet(tmp_path)
    for rows in ([0, 1, 2, 3], [0, 1], [2]):  # those of one file too: the types of batches must not change
        column = read(index, rows).columns["x"]
        want = [[*one.to_pylist(), *other.to_pylist()][row] for row in rows]
        assert all(isinstance(got, str) or got.dtype == kind for got in column)
        assert all(np.all((got == value) | (got != got)) for got, value in zip(column, want, strict=True))


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()])
@pytest.mark.parametrize("begun", [False, True])
def test_a_missing_float_is_nan_as_ray_data_reads_it(tmp_path: Path, kind: pa.DataType, begun: bool) -> None:
    """The type of a column must not depend on the rows of a chunk."""
    ages = pa.array([np.float16(1), None, np.float16(3), np.float16(4)], pa.float16()).cast(kind)
    table = pa.table({"age": ages, "box": [[1.0, None], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]})
    pq.write_table(table, tmp_path / "0.parquet", row_group_size=2)
    pq.write_table(pa.table({"other": [1, 2]}), tmp_path / "1.parquet")
    index = list_parquet(tmp_path)
    if begun:  # the rows of a row group are taken at once
        index.reader.begin(index.table, 0)
    lacked = index.reader.read(index.table.take(pa.array([4, 5]))).columns["age"]
    assert (lacked.dtype, np.isnan(lacked).tolist()) == (kind.to_pandas_dtype(), [True, True])
    for rows in ([0, 1], [2, 3], [1, 2], [3]):
        found = index.reader.read(index.table.take(pa.array(rows))).columns
        want = BlockAccessor.for_block(table.take(pa.array(rows))).to_numpy(["age", "box"])
        assert found["age"].dtype == want["age"].dtype == kind.to_pandas_dtype()
        np.testing.assert_array_equal(found["age"], want["age"])
        np.testing.assert_array_equal(found["box"], np.stack(want["box"]))


def test_a_missing_integer_or_bool_is_none(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [1, None, 3], "flag": [True, None, False]}), tmp_path / "0.parquet")
    index = list_parquet(tmp_path)
    found = read(index).columns
    assert (found["n"], found["flag"]) == ([1, None, 3], [True, None, False])
    assert [column.dtype for column in read(index, [0, 2]).columns.values()] == [np.int64, np.bool_]


@pytest.fixture
def hive(tmp_path: Path) -> Path:
    """Folders as Spark writes them: a number, a name with an escaped slash, and a missing value."""
    for inner, rows in (("y=2020/c=a%2Fb", [1, 2]), ("y=2021/c=__HIVE_DEFAULT_PARTITION__", [3])):
        (tmp_path / "t" / inner).mkdir(parents=True)
        pq.write_table(pa.table({"x": rows, "own": ["f"] * len(rows)}), tmp_path / "t" / inner / "0.parquet")
    return tmp_path / "t"


def test_folders_named_after_values_are_columns(hive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = {"x": [1, 2, 3], "own": ["f"] * 3, "y": [2020, 2020, 2021], "c": ["a/b", "a/b", None]}
    monkeypatch.chdir(hive.parent)
    for path in (hive, "t", "./t/", f"file://{hive}"):
        found = read(list_parquet(path)).columns
        assert {name: list(column) for name, column in found.items()} == want
    assert isinstance(found["y"], np.ndarray)
    assert found["y"].dtype == np.int64
    for columns in (["c", "x"], ["y"]):
        found = read(list_parquet(hive, columns=columns)).columns
        assert {name: list(column) for name, column in found.items()} == {name: want[name] for name in columns}
    assert "its columns are x, own, y, c." in refusal(list_parquet, hive, columns=["year"])


def test_a_folder_named_after_a_value_yields_to_the_files_own_column_and_to_the_path(hive: Path) -> None:
    assert [*read(list_parquet(hive / "y=2020")).columns] == ["x", "own", "c"], "only folders below the given one"
    (hive / "y=2021").rename(hive / "own=g")
    found = read(list_parquet(hive)).columns
    assert list(found["own"]) == ["f"] * 3
    assert sorted(map(str, found["y"])) == ["2020", "2020", "None"]


def write_without(folder: Path) -> dict[str, list[Any]]:
    """Three files, of which only the second has all columns. Return what all rows hold."""
    tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(8, dtype=np.float32).reshape(2, 2, 2))
    for number, columns in enumerate(
        (
            {"id": [0, 1]},
            {
                "id": [2, 3],
                "n": pa.array([5, 6], pa.int32()),
                "kind": pa.array(["a", "b"]).dictionary_encode(),
                "t": tensor,
            },
            {"n": pa.array([7.5]), "id": [4]},
        )
    ):
        pq.write_table(pa.table(columns), folder / f"{number}.parquet")
    arrays = list(tensor.to_numpy_ndarray())
    return {
        "id": [0, 1, 2, 3, 4],
        "n": [np.nan, np.nan, 5, 6, 7.5],
        "kind": [None, None, "a", "b", None],
        "t": [None, None, *arrays, None],
    }


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4], [0, 1], [4], [3, 0], [2]])
def test_a_column_that_some_files_lack_holds_nan_or_none_there(tmp_path: Path, rows: list[int]) -> None:
    want = write_without(tmp_path)
    for columns in (None, ["id", "t"], ["kind"], ["n"]):
        found = read(list_parquet(tmp_path, columns=columns), rows).columns
        assert sorted(found) == sorted(columns or want), "whichever file's rows these are"
        for name, column in found.items():
            nan = {"equal_nan": True} if name == "n" else {}
            assert all(np.array_equal(got, want[name][row], **nan) for got, row in zip(column, rows, strict=True))
    assert "0.parquet' has no column 'm'; its columns are id." in refusal(list_parquet, tmp_path, columns=["n", "m"])
    assert "0.parquet' has no column 'n'" in refusal(list_parquet, tmp_path, images=["n"])


def test_a_column_of_folders_is_none_of_those_that_files_lack(hive: Path) -> None:
    pq.write_table(pa.table({"x": [4], "y": [1999]}), hive / "0.parquet")
    found = read(list_parquet(hive)).columns
    assert {x: (y, own) for x, y, own in zip(found["x"], found["y"], found["own"], strict=True)} == {
        1: (2020, "f"),
        2: (2020, "f"),
        3: (2021, "f"),
        4: (1999, None),
    }


def test_a_column_of_folders_that_some_files_hold_themselves_in_another_type(tmp_path: Path) -> None:
    for year, columns in ((2024, {"x": [1], "y": pa.array([2024], pa.int32())}), (2025, {"x": [2]})):
        (tmp_path / f"y={year}").mkdir()
        pq.write_table(pa.table(columns), tmp_path / f"y={year}" / "0.parquet")
    for asked in (None, ["y", "x"]):
        found = read(list_parquet(tmp_path, columns=asked)).columns
        assert found["y"].dtype == np.int64
        assert list(zip(found["x"], found["y"], strict=True)) == [(1, 2024), (2, 2025)]
    (tmp_path / "y=unknown").mkdir()
    pq.write_table(pa.table({"x": [3]}), tmp_path / "y=unknown" / "0.parquet")
    assert "column 'y' is int32 in" in refusal(list_parquet, tmp_path)
    assert list(read(list_parquet(tmp_path, columns=["x"])).columns["x"]) == [1, 2, 3]


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    pq.write_table(
        pa.Table.from_arrays([pa.array([number]) for number in range(3)], ["id", "x", "x"]), tmp_path / "a.parquet"
    )
    for columns in (None, ["x"]):
        text = refusal(list_parquet, tmp_path, columns=columns)
        assert f"{str(tmp_path / 'a.parquet')!r} has several columns 'x'" in text
        assert "parquet(columns=[...])" in text
    assert list(read(list_parquet(tmp_path, columns=["id"])).columns["id"]) == [0]


def test_files_whose_columns_have_no_common_type(tmp_path: Path) -> None:
    for number, values in enumerate(([1], [2], ["three"])):
        pq.write_table(pa.table({"id": [number], "x": values}), tmp_path / f"{number}.parquet")
    text = refusal(list_parquet, tmp_path)
    assert f"column 'x' is int64 in {str(tmp_path / '0.parquet')!r}" in text
    assert f"string in {str(tmp_path / '2.parquet')!r}" in text
    assert "parquet(columns=[...])" in text
    assert list(read(list_parquet(tmp_path, columns=["id"])).columns["id"]) == [0, 1, 2]


def test_values_that_do_not_fit_the_type_of_the_other_files(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": pa.array([2**63], pa.uint64())}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"x": pa.array([-1], pa.int64())}), tmp_path / "1.parquet")
    with pytest.raises(RunError, match=r"column 'x' of .*0\.parquet' cannot become int64, which its other files need"):
        read(list_parquet(tmp_path))


def test_tables_that_are_not_as_expected(tables: Path, tmp_path: Path) -> None:
    assert "does not exist" in refusal(list_parquet, tmp_path / "nowhere")
    assert "No such file" in refusal(list_parquet, tmp_path / "nowhere.parquet")
    (tmp_path / "csv").mkdir()
    assert "no *.parquet files under" in refusal(list_parquet, tmp_path / "csv")
    pq.write_table(pa.table({"x": pa.array([], pa.int64())}), tmp_path / "csv" / "e.parquet")
    assert "hold no rows" in refusal(list_parquet, tmp_path / "csv")
    (tables / "c.parquet").write_bytes(b"PAR1 cut off")
    text = refusal(list_parquet, tables)
    assert "c.parquet' as Parquet" in text


# --- webdataset -------------------------------------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Three shards of four samples, written by the webdataset package."""
    import webdataset

    root = tmp_path / "shards"
    root.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for shard in range(3):
            with webdataset.TarWriter(str(root / f"data-{shard:03d}.tar")) as sink:
                for i in range(shard * 4, shard * 4 + 4):
                    sample = {
                        "__key__": f"part/{i:04d}",
                        "jpg": np.full((8, 12, 3), i * 20, np.uint8),
                        "cls": i % 3,
                        "txt": f"caption {i}",
                        "json": {"id": i},
                        "features.bin": bytes([i]),
                    }
                    sink.write(sample)
    return root


def test_samples_of_all_shards(shards: Path) -> None:
    index = list_webdataset(shards)
    assert len(index) == 12
    assert index.groups is not None
    assert index.groups.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    samples = read(index)
    assert samples.errors == {}
    assert set(samples.columns) == {"image", "label", "txt", "json", "features.bin"}
    assert np.asarray(samples.columns["label"]).tolist() == [i % 3 for i in range(12)]
    assert np.asarray(samples.columns["label"]).dtype == np.int64
    assert [abs(int(image[0, 0, 0]) - i * 20) <= 3 for i, image in enumerate(samples.columns["image"])] == [True] * 12
    assert samples.columns["txt"][5] == "caption 5"
    assert samples.columns["json"][7] == {"id": 7}
    assert samples.columns["features.bin"][2] == b"\x02"
    assert index.reader.describe(index.table, 5) == f"part/0005 in {shards / 'data-001.tar'}"
    assert read(index, [11, 0]).columns["txt"] == ["caption 11", "caption 0"]


def test_ways_to_name_shards(shards: Path) -> None:
    whole = list_webdataset(shards).table
    for paths in (
        str(shards),
        shards / "data-{000..002}.tar",
        str(shards / "*.tar"),
        str(shards / "data-00?.tar"),
        [shards / f"data-{i:03d}.tar" for i in range(3)],
        [str(shards / "data-{000..001}.tar"), str(shards / "data-002.tar")],
        f"file://{shards}/data-{{000..002}}.tar",
        f"file://{shards}/data-*.tar",
        f"file://{shards.parent}/{shards.name[:-1]}?/data-00[0-2].tar",
        shards / "data-{000..2}.tar",
        shards / "data-{000,001,002}.tar",
        shards / "data-00{0,{1..2}}.tar",
        str(shards / "{data-{000..001},data-002}.tar"),
        str(shards / "data-00{0..1}*.tar") + f"::{shards}/data-002.tar",
        f"{shards}/data-000.tar::{shards}/data-{{001..002}}.tar",
        f"file://{shards}/data-000.tar::file://{shards}/data-{{001..002..1}}.tar",
        f"file:{shards}/data-{{000..002}}.tar",
    ):
        assert list_webdataset(paths).table.equals(whole)
    assert len(list_webdataset(shards / "data-001.tar")) == 4
    (odd,) = whole.filter(pc.equal(whole["key"], "part/0000"))["shard"].unique().to_pylist()
    for pattern, order in (("{2..0}", [2, 1, 0]), ("{0..2..2}", [0, 2]), ("{2,0,2}", [2, 0, 2])):
        found = list_webdataset(shards / f"data-00{pattern}.tar").table["shard"].to_pylist()[::4]
        assert found == [odd.replace("data-000", f"data-00{number}") for number in order]


def test_patterns_that_name_what_is_not_there(shards: Path) -> None:
    """The message names the pattern and the first file that is missing."""
    (shards / "empty").mkdir()
    for pattern, missing in (
        ("data-{000..004}.tar", "data-003.tar"),
        ("data-000.tar::data-005.tar::data-006.tar", "data-005.tar"),
        ("data-{000,00{4,5}}.tar", "data-004.tar"),
        ("data-{000..003}*.tar", "data-003*.tar"),
        ("{empty,.}", "empty"),
        ("data-{0..1}", "data-0"),
    ):
        parts = [str(shards / part) for part in pattern.split("::")]
        for scheme in ("", "file://"):
            text = refusal(list_webdataset, "::".join(scheme + part for part in parts))
            assert f"{shards / missing}'" in text
            assert f"The pattern '{scheme}{shards}/{pattern.split('::')[0]}" in text
    assert "no *.tar shards under" in refusal(list_webdataset, [shards / "data-000.tar", shards / "empty"])
    text = refusal(list_webdataset, "pipe:aws s3 cp s3://bucket/{000..009}.tar -")
    assert "'pipe:aws s3 cp s3://bucket/{000..009}.tar -' is a command" in text
    assert "Name the shards instead" in text
    assert "do not match, and no shard has this very name" in refusal(list_webdataset, shards / "data-{0.tar")


def test_chained_file_systems_keep_their_double_colon(shards: Path, tmp_path: Path) -> None:
    (shards / "packed.zip").write_bytes(b"")
    with zipfile.ZipFile(shards / "packed.zip", "w") as packed:
        packed.write(shards / "data-001.tar", "1.tar")
    for path in (f"simplecache::file://{shards}/data-00{{1..1}}.tar", f"zip://1.tar::file://{shards}/packed.zip"):
        assert read(list_webdataset(path)).columns["txt"][0] == "caption 4"


@pytest.mark.parametrize("name", ["br[1]", "{0..1}x", "star*", "q?", "a::b", "{a,b}", "un{balanced"])
def test_a_path_that_exists_is_no_pattern(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    for number in range(2):
        add_members(folder / f"s{number}.tar", {"a.cls": str(number).encode()})
    add_members(folder / "s[0].tar", {"a.cls": b"2"})
    add_members(folder / "{0..1}::{x.tar", {"a.cls": b"3"})
    ways = (
        (folder, [0, 1, 2, 3]),
        (folder / "s[0].tar", [2]),
        (folder / "{0..1}::{x.tar", [3]),
        (f"file://{folder}/{{0..1}}::{{x.tar", [3]),
        (folder / "s{0..1}.tar", [0, 1]),
        ([folder / "s1.tar"], [1]),
        (str(folder / "s?.tar"), [0, 1]),
    )
    for shards, labels in ways:
        assert sorted(read(list_webdataset(shards)).columns["label"]) == labels


def test_compressed_shards_are_named_with_the_remedy(tmp_path: Path) -> None:
    packed = make_folder(tmp_path, {"0.tar.gz": gzip.compress(b"")}) / "0.tar.gz"
    for shards in (packed, tmp_path, [packed], f"file://{packed}", str(tmp_path / "*.gz"), tmp_path / "{0..1}.tar.gz"):
        text = refusal(list_webdataset, shards)
        assert f"{packed}' is a compressed shard" in text
        assert "gunzip" in text
    add_members(tmp_path / "1.tar", {"a.cls": b"1"})
    assert len(list_webdataset(tmp_path)) == 1


def test_shards_on_another_file_system(shards: Path) -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    for path in shards.iterdir():
        fs.pipe(f"/tars/{path.name}", path.read_bytes())
    for paths, filesystem in (("memory://tars", None), ("memory://tars/data-{000..002}.tar", None), ("/tars", fs)):
        index = list_webdataset(paths, filesystem=filesystem)
        assert len(index) == 12
        assert read(index).columns["txt"][11] == "caption 11"


class RefusesEmptyRanges(MemoryFileSystem):  # type: ignore[misc]
    """Storage that refuses a range of no bytes, as obstore does."""

    cachable = False

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        if start is not None and start == end:
            raise ValueError(f"Invalid range requested, start: {start} end: {end}")
        return bytes(super().cat_file(path, start, end, **kwargs))


def test_a_sample_whose_only_member_is_empty(tmp_path: Path) -> None:
    add_members(tmp_path / "a.tar", {"a.txt": b"", "b.txt": b"b"})
    storage = RefusesEmptyRanges()
    storage.pipe("/empty/a.tar", (tmp_path / "a.tar").read_bytes())
    for shards, filesystem in ((tmp_path, None), ("/empty", storage)):
        assert read(list_webdataset(shards, filesystem=filesystem)).columns["txt"] == ["", "b"]


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_an_image_transform_where_many_samples_in_a_row_have_no_image(tmp_path: Path, on_error: Any) -> None:
    add_members(tmp_path / "a.tar", {f"{number}.jpg": encoded() for number in range(3)})
    add_members(tmp_path / "b.tar", {f"{number}.txt": b"no image" for number in range(3, 40)})
    data = webdataset(tmp_path, v2.Resize((4, 4)), on_error=on_error, shuffle=False)
    if on_error == "raise":
        with pytest.raises(
            RunError, match=r"sample 3 \(3 in .*b\.tar\) is unusable: it has no image.*on_error=\"skip\""
        ):
            a_pass(stream_of(data, shuffle=False))
        return
    rows = a_pass(stream_of(data, shuffle=False))
    skipped = [position for position, row in rows.items() if row.get(ERROR) is not None]
    assert sorted(rows) == list(range(40))
    assert sorted(skipped) == list(range(3, 40))
    assert rows[39][ERROR].endswith("it has no image")


def test_a_shard_of_any_name(tmp_path: Path) -> None:
    import fsspec

    add_members(tmp_path / "shard-0", {"a.cls": b"7"})
    memory = fsspec.filesystem("memory")
    memory.pipe({f"/named/{name}": (tmp_path / "shard-0").read_bytes() for name in ("shard-0", "0.tar?signature=1")})
    for shards in (
        tmp_path / "shard-0",
        [str(tmp_path / "shard-0")],
        "memory://named/shard-0",
        "memory://named/{0..0}.tar?signature=1",
    ):
        assert list(read(list_webdataset(shards)).columns["label"]) == [7]


def test_globs_mean_the_same_on_every_file_system(shards: Path) -> None:
    for name in ("more/z.tar", "more[1]/a.tar", "more[1]/data-[0].tar", ".hidden.tar", "no-shard.txt"):
        (shards / name).parent.mkdir(exist_ok=True)
        add_members(shards / name, {"a.cls": b"1"})
    for pattern in (
        "*.tar",
        "data-00[12].tar",
        "more[1]/data-[0].tar",
        "*",
        "more*",
        "m*/*.tar",
        "more[1]/*",
        ".h*",
        "data-00?.tar",
    ):
        want = list_webdataset(str(shards / pattern))
        for path, fs in (
            (f"file://{shards}/{pattern}", None),
            (pattern, subtree(shards)),
            (f"{shards.name}/{pattern}", subtree(shards.parent)),
            (f"/{shards.name}/{pattern}", dirfs(shards.parent)),
        ):
            found = list_webdataset(path, filesystem=fs)
            assert [key["key"] for key in found.table.to_pylist()] == [key["key"] for key in want.table.to_pylist()]
            assert list(read(found).columns["label"]) == list(read(want).columns["label"])
    for path, fs in (
        (f"file://{shards}/b*.tar", None),
        (f"file://{shards}/none/*.tar", None),
        ("b*.tar", subtree(shards)),
    ):
        assert f"no *.tar shards under '{path}'" in refusal(list_webdataset, path, filesystem=fs)
    (shards / "x.tar.gz").write_bytes(gzip.compress(b""))
    assert "x.tar.gz' is a compressed shard" in refusal(list_webdataset, f"file://{shards}/x*")


def test_torch_tensors_and_other_members_arrive_as_bytes(tmp_path: Path) -> None:
    array = io.BytesIO()
    np.save(array, np.arange(3))
    add_members(tmp_path / "x.tar", {"a.npy": array.getvalue(), "b.npy": array.getvalue()})
    assert read(list_webdataset(tmp_path)).columns["npy"] == [array.getvalue()] * 2


def add_members(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def test_members_that_cannot_be_parsed_are_errors_of_their_own_samples(tmp_path: Path) -> None:
    add_members(
        tmp_path / "x.tar",
        {
            "good.jpg": encoded(),
            "good.cls": b"1",
            "image.jpg": b"\xff\xd8 broken",
            "image.cls": b"2",
            "label.jpg": encoded(),
            "label.cls": b"two",
            "text.jpg": encoded(),
            "text.cls": b"4",
            "text.json": b"{",
        },
    )
    samples = read(list_webdataset(tmp_path / "x.tar"))
    assert sorted(samples.errors) == [1, 2, 3]
    assert samples.errors[1].startswith("corrupt .jpg")
    assert samples.errors[2] == "corrupt .cls: it holds no whole number, but 'two'. Text belongs into .txt"
    assert set(samples.columns) == {"image", "label", "json"}
    assert samples.columns["label"][0] == 1


@pytest.mark.parametrize("order", [("jpg", "png"), ("png", "jpg")])
def test_an_image_and_its_mask_of_one_key_are_two_columns(tmp_path: Path, order: tuple[str, str]) -> None:
    data = {"jpg": encoded(), "png": encoded(GREY, mode="L", kind="PNG")}
    add_members(tmp_path / "x.tar", {f"a.{extension}": data[extension] for extension in order})
    columns = read(list_webdataset(tmp_path)).columns
    assert np.abs(columns["image"][0].astype(int) - RED).max() <= 12
    assert columns["png"] == [data["png"]]


@pytest.mark.parametrize("index_file", [False, True])
def test_a_sample_is_the_same_whichever_samples_it_is_read_with(tmp_path: Path, index_file: bool) -> None:
    """A function of a sample must not find a column in one chunk, and none in the next."""
    add_members(
        tmp_path / "x.tar", {"a.jpg": encoded(), "a.cls": b"1", "b.cls": b"2", "b.json": b"null", "c.jpg": encoded()}
    )
    add_members(tmp_path / "y.tar", {"d.txt": b"caption"})
    if index_file:
        with tarfile.open(tmp_path / "y.tar") as tar:
            (member,) = tar.getmembers()
        (tmp_path / "y.idx").write_text(f"v1.2 1\ntxt {member.offset_data} {member.size} {member.name}\n")
    index = list_webdataset(tmp_path)
    together = read(index).columns
    assert list(together) == ["image", "label", "json", "txt"]
    assert [image is None for image in together["image"]] == [False, True, False, True]
    assert together["label"] == [1, 2, None, None]
    assert together["txt"] == [None, None, None, "caption"]
    for row in range(4):
        alone = read(index, [row]).columns
        assert list(alone) == list(together)
        for name, column in alone.items():
            assert np.array_equal(column[0], together[name][row]), name


def test_names_of_members_need_not_be_text(tmp_path: Path) -> None:
    names = [os.fsdecode(each) for each in (b"caf\xe9.cls", b"caf\xe8.cls", b"caf\xe8.\xff")]
    add_members(tmp_path / "x.tar", {name: str(number).encode() for number, name in enumerate(names)})
    index = list_webdataset(tmp_path)
    columns = read(index).columns
    assert (columns["label"].tolist(), columns[r"\xff"]) == ([0, 1], [None, b"2"])
    assert index.reader.describe(index.table, 0) == f"caf\\xe9 in {tmp_path / 'x.tar'}"


def test_names_of_shards_and_tables_must_be_text(tmp_path: Path) -> None:
    add_members(tmp_path / "x.tar", {"a.cls": b"1"})
    pq.write_table(pa.table({"x": [1]}), tmp_path / "x.parquet")
    for suffix, listing in ((".tar", list_webdataset), (".parquet", list_parquet)):
        odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff" + suffix.encode())
        os.rename(tmp_path / f"x{suffix}", odd)
        for path in (odd, tmp_path):
            assert rf"the name of '{tmp_path}/\xff{suffix}' is not UTF-8" in refusal(listing, path)


def test_lists_of_different_lengths_in_json(tmp_path: Path) -> None:
    add_members(tmp_path / "x.tar", {f"{i}.json": json.dumps(list(range(i + 1))).encode() for i in range(3)})
    assert [list(row) for row in read(list_webdataset(tmp_path)).columns["json"]] == [[0], [0, 1], [0, 1, 2]]


def test_a_shard_that_ends_too_soon(shards: Path) -> None:
    path = shards / "data-000.tar"
    with tarfile.open(path) as tar:
        last = tar.getmembers()[-1]
    whole = path.read_bytes()
    index = list_webdataset(path)
    path.write_bytes(whole[: last.offset_data])  # while the run goes on
    samples = read(index)
    assert list(samples.errors) == [3]
    assert "the shard ends after 0 of its" in samples.errors[3]


def test_shards_that_are_not_as_expected(shards: Path, tmp_path: Path) -> None:
    assert "does not exist" in refusal(list_webdataset, tmp_path / "nowhere")
    mixed = [str(shards / "data-000.tar"), "memory://tars/data-001.tar"]
    assert f"{mixed[0]!r} and {mixed[1]!r} lie on different storage" in refusal(list_webdataset, mixed)
    assert "no *.tar shards" in refusal(list_webdataset, str(tmp_path / "nothing-*.tar"))
    assert "data-003.tar' as a tar shard" in refusal(list_webdataset, shards / "data-{000..003}.tar")
    add_members(tmp_path / "empty.tar", {})
    assert "hold no samples" in refusal(list_webdataset, tmp_path / "empty.tar")
    (tmp_path / "packed.tar").write_bytes(gzip.compress((shards / "data-000.tar").read_bytes()))
    assert "ompressed shards must be unpacked" in refusal(list_webdataset, tmp_path / "packed.tar")
