"""The GPUs, the driver and the libraries of this machine."""

import shutil
import subprocess
from typing import Any

import torch
import torchvision

from benchmarks.gpu.place import Found, Place

GIB = 2**30


def devices(place: Place) -> Found:
    """Names and memory of the GPUs; versions of driver, CUDA, cuDNN, NCCL and torch."""
    figures: dict[str, Any] = {
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "cuda": torch.version.cuda,
        "driver": _driver(),
        "gpus": [],
        "shm_gib": round(shutil.disk_usage("/dev/shm").total / GIB, 1),
    }
    if place.device == "cpu":
        return Found(said=f"no GPU, torch {torch.__version__}", figures=figures)
    figures["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    figures["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        figures["gpus"].append(
            {
                "name": properties.name,
                "memory_gib": round(properties.total_memory / GIB, 1),
                "capability": f"{properties.major}.{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
            }
        )
    first = figures["gpus"][0]
    said = f"{len(figures['gpus'])} × {first['name']}, {first['memory_gib']} GiB, driver {figures['driver']}, CUDA {figures['cuda']}"
    return Found(said=said, figures=figures)


def _driver() -> str | None:
    """The version of the driver; None if nvidia-smi does not tell it."""
    try:
        told = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        ).stdout.split()  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return told[0] if told else None
