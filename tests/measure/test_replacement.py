"""What equivalents bring, in words and for programs."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.measure.equivalents import DROP_INS
from offload.measure.replacement import Distance, Replacement, document, predicted, sentences
from tests.measure.test_findings import FOUND

BLUR, JITTER = DROP_INS
MEASURED = Replacement(
    chosen=(BLUR,),
    left=((JITTER, 0.98),),
    samples=48,
    before_s=0.08,
    after_s=0.008,
    over=0.1,
    distances=[Distance(name="image", dtype="uint8", largest=1.0, mean=0.0123), Distance(name="label", dtype="int64", largest=0, mean=0)],
)  # fmt: skip


def test_the_measurement_and_the_prediction_are_said() -> None:
    stays, costs, differ, then = sentences(FOUND, MEASURED)
    assert stays == "ColorJitter stays: offload.transforms.ColorJitter takes 98% of the time of these samples."
    assert costs == (
        "offload.transforms.GaussianBlur: 80 → 8 core-ms a sample, measured on one core with 48 samples and equal seeds."
    )
    assert differ == "Outputs differ by at most 1 in image (uint8), 0.012 on average."
    # A tenth of 29 core-ms on 3 cores are 1,034 samples/s, more than the GPU's 569.
    assert then == (
        "Prediction: an input ceiling of 1,034 samples/s instead of 103; then the NVIDIA A10G binds (stall 0% instead of 82%)."
    )


def test_where_the_input_still_binds_it_is_said() -> None:
    said = sentences(FOUND, dataclasses.replace(MEASURED, over=0.5))
    assert re.search(r"then the input still binds \(stall 6\d% instead of 82%\)", said[-1])


@given(over=st.floats(0.01, 1.0))
def test_cheaper_samples_never_lower_the_prediction(over: float) -> None:
    then = predicted(FOUND, dataclasses.replace(MEASURED, over=over))
    assert then.input_ceiling >= FOUND.input_ceiling
    assert then.input_ceiling <= (FOUND.ingest_samples_per_s or 0)
    assert then.stall <= FOUND.stall + 1e-9
    assert then.gpu_ceiling == FOUND.gpu_ceiling


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"distances": None}, "Outputs cannot be compared"),
        ({"distances": []}, "The outputs are equal."),
        (
            {"unlike": (JITTER,)},
            "ColorJitter stays: with offload.transforms.ColorJitter samples have another shape or type.",
        ),
        ({"chosen": (BLUR, JITTER)}, "offload.transforms.GaussianBlur and offload.transforms.ColorJitter: 80"),
    ],
)
def test_each_outcome_has_its_sentence(change: dict[str, object], said: str) -> None:
    assert said in " ".join(sentences(FOUND, dataclasses.replace(MEASURED, **change)))


def test_where_nothing_pays_nothing_is_promised() -> None:
    assert len(sentences(FOUND, dataclasses.replace(MEASURED, chosen=()))) == 1


def test_programs_get_seconds_and_rates() -> None:
    found = json.loads(json.dumps(document(FOUND, MEASURED), allow_nan=False))
    assert found["taken"] == ["offload.transforms.GaussianBlur"]
    assert found["left"] == {"offload.transforms.ColorJitter": 0.98}
    assert found["core_seconds_per_sample"] == {"before": 0.08, "after": 0.008}
    assert found["distances"][0] == {"name": "image", "dtype": "uint8", "largest": 1.0, "mean": 0.0123}
    assert found["predicted"]["input_samples_per_s"] == pytest.approx(predicted(FOUND, MEASURED).input_ceiling)
