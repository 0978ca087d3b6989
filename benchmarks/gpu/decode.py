"""Samples/s of decoding JPEG files on the GPU, against one core."""

import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.gpu.place import Found, NotApplicable, Place

SECONDS = 4.0
BATCH = 64
FILES = 128


def decode(place: Place) -> Found:
    """Figures only: torchvision's decoder on the GPU, and simplejpeg's on one core, on the same files."""
    place.need_gpu()
    import simplejpeg

    try:
        from torchvision.io import decode_jpeg
    except ImportError:  # deprecated since torchvision 0.29
        raise NotApplicable("this torchvision decodes no JPEG files") from None
    from benchmarks import workloads

    torch.set_num_threads(1)
    folder = workloads.jpeg_files(place.folder / "jpeg", images=FILES * 5 // 4)
    files = [path.read_bytes() for path in sorted(folder.rglob("*.jpg"))[:FILES]]
    tensors = [torch.from_numpy(np.frombuffer(each, np.uint8).copy()) for each in files]

    def on_gpu(first: int) -> int:
        batch = [tensors[(first + i) % len(tensors)] for i in range(BATCH)]
        decode_jpeg(batch, device="cuda")
        torch.cuda.synchronize()
        return BATCH

    def on_core(first: int) -> int:
        simplejpeg.decode_jpeg(files[first % len(files)], colorspace="RGB")
        return 1

    core = _rate(on_core)
    place.so_far({"one_core_samples_per_s": core})
    try:
        gpu = _rate(on_gpu)
    except RuntimeError as error:
        if "nvjpeg" not in str(error).lower():
            raise
        raise NotApplicable("this torchvision was built without nvJPEG") from None
    figures = {
        "one_core_samples_per_s": core,
        "gpu_samples_per_s": gpu,
        "gpu_over_one_core": gpu / core,
        "batch": BATCH,
    }
    return Found(
        said=f"GPU {gpu:,.0f} samples/s, one core {core:,.0f}: as much as {gpu / core:.1f} cores", figures=figures
    )


def _rate(decoded: Callable[[int], int]) -> float:
    """Samples/s of a function that decodes from sample ``first`` on, and returns how many it has decoded."""
    decoded(0)
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        done += decoded(done)
    return done / (time.perf_counter() - began)
