"""Node types and their prices: what ships, what a user adds, and what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from offload.errors import ConfigError
from offload.model import Catalog, NodeType
from offload.prices import built_in, load_catalog, refreshed

OWN = """
[nodes."my.box"]
vcpus = 8
memory_gib = 32
network_gbps = 1
usd_per_hour = 0.5
"""


def test_the_built_in_catalog_says_where_its_prices_are_from() -> None:
    catalog = built_in()
    assert len(catalog.nodes) > 30
    for kind in catalog.nodes.values():
        assert kind.region
        assert kind.price_source
        assert (kind.gpus > 0) == (kind.gpu_model is not None)
    assert catalog["ml.c5.4xlarge"].usd_per_hour == 0.816
    assert catalog["ml.g5.xlarge"].burst


def test_a_file_extends_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(OWN + OWN.replace("my.box", "ml.c5.4xlarge"))
    catalog = load_catalog(path)
    assert catalog["my.box"].vcpus == 8
    assert catalog["ml.c5.4xlarge"].usd_per_hour == 0.5
    assert catalog["ml.g5.xlarge"].gpus == 1
    with pytest.raises(ConfigError, match=r"the catalog .*none.toml cannot be read: No such file"):
        load_catalog(tmp_path / "none.toml")


def test_an_unknown_type_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no instance type 'ml.c5.4xlrage'. Nearest: ml.c5.4xlarge"):
        built_in()["ml.c5.4xlrage"]
    with pytest.raises(ConfigError, match=r"It holds"):
        built_in()["???"]


def test_each_type_has_its_place() -> None:
    with pytest.raises(ConfigError, match=r"ml.c5.4xlarge has no GPU and cannot hold workers"):
        built_in().gpu_type("ml.c5.4xlarge")
    with pytest.raises(ConfigError, match=r"ml.g5.xlarge has 1 GPUs that would idle"):
        built_in().cpu_type("ml.g5.xlarge")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (OWN + OWN, r"not valid TOML: .*my.box.*each type may appear only once"),
        (OWN.replace("usd_per_hour = 0.5", ""), r"my.box has no usd_per_hour \(US dollars per hour"),
        (OWN.replace("0.5", "0"), r"usd_per_hour of my.box must be greater than 0"),
        (OWN.replace("0.5", "nan"), r"usd_per_hour of my.box must be a number .*found NaN"),
        (OWN.replace("0.5", '"cheap"'), r"usd_per_hour of my.box must be a number .*found 'cheap'"),
        (OWN.replace("vcpus = 8", "vcpus = 0"), r"vcpus of my.box must be at least 1"),
        (OWN + "burst = 1\n", r"burst of my.box must be true or false"),
        (OWN + "usd_per_hours = 1\n", r"unknown field 'usd_per_hours'. Did you mean usd_per_hour"),
        (OWN + "color = 1\n", r"unknown field 'color'. Known are vcpus"),
        ("x = [", r"not valid TOML"),
        ("x = " + "[" * 5000, r"own.toml (cannot be read|is not valid TOML): "),
        ("x = " + "9" * 5000, r"own.toml (cannot be read|is not valid TOML): "),
        ("", r"holds no nodes"),
        ("nodes = 3", r"holds no nodes"),
        ("[nodes]\na = 3", r"a must be a table"),
    ],
)
def test_a_mistake_in_a_catalog_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        Catalog.from_toml(text, source="own.toml")
    assert str(caught.value).startswith(("own.toml", "usd_per_hour", "vcpus", "burst", "my.box"))


@pytest.mark.parametrize(
    ("model", "device", "same"),
    [
        ("NVIDIA A10G", "NVIDIA A10G", True),
        ("NVIDIA A100", "NVIDIA A100-SXM4-40GB", True),
        ("NVIDIA H100", "NVIDIA H100 80GB HBM3", True),
        ("NVIDIA V100", "Tesla V100-SXM2-16GB", True),
        ("NVIDIA L4", "NVIDIA L40S", False),
        ("NVIDIA A10G", "NVIDIA A100-SXM4-40GB", False),
        ("NVIDIA A10G", "cpu", False),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB", True),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", False),  # as large a memory is not the same GPU
        ("NVIDIA RTX 6000 Ada Generation", "NVIDIA RTX 4000 Ada Generation", False),
        ("NVIDIA", "NVIDIA A10G", False),
    ],
)
def test_a_gpu_is_recognised_by_what_torch_calls_it(model: str, device: str, same: bool) -> None:
    kind = NodeType(name="n", vcpus=1, memory_gib=1, gpus=1, gpu_model=model, network_gbps=1, usd_per_hour=1)
    assert kind.is_model_of(device) == same


class PriceList:
    """Answers as AWS's price list does (moto's has no SageMaker products)."""

    def __init__(self, usd: str | None) -> None:
        self.usd, self.asked = usd, []  # type: ignore[var-annotated]

    def get_products(self, **query: Any) -> dict[str, Any]:
        self.asked.append(query)
        if self.usd is None:
            return {"PriceList": []}
        dimension = {"pricePerUnit": {"USD": self.usd}}
        return {"PriceList": [json.dumps({"terms": {"OnDemand": {"a": {"priceDimensions": {"b": dimension}}}}})]}


def test_prices_are_refreshed_with_their_source() -> None:
    client = PriceList("0.9")
    catalog = refreshed(built_in(), "eu-west-1", names=["ml.c5.4xlarge"], client=client)
    kind = catalog["ml.c5.4xlarge"]
    assert (kind.usd_per_hour, kind.region, kind.price_source) == (0.9, "eu-west-1", "AWS price list API")
    assert catalog["ml.g5.xlarge"] == built_in()["ml.g5.xlarge"]
    assert {"Type": "TERM_MATCH", "Field": "regionCode", "Value": "eu-west-1"} in client.asked[0]["Filters"]
    with pytest.raises(ConfigError, match=r"no on-demand training price of ml.c5.4xlarge in mars-1. Name a region"):
        refreshed(built_in(), "mars-1", names=["ml.c5.4xlarge"], client=PriceList(None))


def test_prices_without_credentials_are_a_matter_of_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    with pytest.raises(ConfigError, match=r"price list cannot be queried \(NoCredentialsError.*pricing:GetProducts"):
        refreshed(built_in(), "us-east-1", names=["ml.c5.4xlarge"])


def test_a_profile_of_aws_that_does_not_exist_is_a_matter_of_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"price list cannot be queried \(ProfileNotFound.*\(nobody\)"):
        refreshed(built_in(), "us-east-1", names=["ml.c5.4xlarge"])
