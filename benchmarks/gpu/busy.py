"""How busy offload keeps the GPU with real JPEG files, on few cores and on all, beside a DataLoader and the model's prediction."""

import time
from typing import Any

from benchmarks import workloads
from benchmarks.gpu import feeding
from benchmarks.gpu.place import Found, Place
from offload.machine import usable_cores

MODELS = ("vit_base_patch16_224", "resnet50")
FEW_CORES = 4
IMAGES = 600


def busy(place: Place) -> Found:
    """Samples/s and busy share of both models with bf16, from real files, against the model's ceiling with data on the device. A
    DataLoader has the same cores. A probe on all cores predicts each run before it begins."""
    began = time.monotonic()
    folder = workloads.jpeg_files(place.folder / "jpeg", images=place.pick(IMAGES, 40))
    photos = feeding.Samples(workloads.get("jpeg", folder))
    figures: dict[str, Any] = {"making_files_s": round(time.monotonic() - began, 1), "models": {}}
    size = feeding.batch_size(place)
    cases = [feeding.Case(model=name, data=photos, batch_size=size) for name in place.pick(MODELS, ("resnet10t",))]
    profiles = {}
    for case in cases:
        figures["models"][case.model] = {"batch_size": size, "ceiling_samples_per_s": feeding.ceiling(place, case)}
        place.so_far(figures)
    with place.ray():
        for case in cases:
            profiles[case.model] = feeding.profile(place, case)
            place.so_far(figures)
    cores = sorted({min(FEW_CORES, usable_cores()), usable_cores()}) if place.device == "cuda" else [None]
    for count in cores:  # the models share a Ray
        with place.ray(count):
            for case in cases:
                predicted = feeding.predicted(profiles[case.model], size, cores=count or 2)
                found = feeding.run(place, case)
                alone = feeding.dataloader(place, case, workers=count or 1)
                found |= {
                    "predicted_samples_per_s": predicted,
                    "prediction_error": predicted / found["samples_per_s"] - 1,
                    "dataloader_samples_per_s": alone["samples_per_s"],
                    "dataloader_utilization": alone["utilization"],
                }
                figures["models"][case.model][f"{count or 'shared'} cores"] = found
                place.so_far(figures)
    return Found(said=_sentence(figures["models"]), figures=figures)


def _sentence(models: dict[str, dict[str, Any]]) -> str:
    said = []
    for name, each in models.items():
        runs = [
            f"{run['samples_per_s']:,.0f} on {key} (busy {run['busy_share']:.0%}, predicted {run['predicted_samples_per_s']:,.0f}, "
            f"DataLoader {run['dataloader_samples_per_s']:,.0f})"
            for key, run in each.items()
            if isinstance(run, dict)
        ]
        said.append(f"{name}: {', '.join(runs)} of {each['ceiling_samples_per_s']:,.0f} samples/s")
    return "; ".join(said)
