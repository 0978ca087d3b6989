"""Catalogs of node types as files, and current prices from AWS. :mod:`offload.model.catalog` defines the catalog itself."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from offload.errors import ConfigError
from offload.files import read_text
from offload.model.catalog import Catalog

BUILT_IN = "sagemaker.toml"
PRICE_API_REGION = "us-east-1"  # few regions serve the price list, each for all regions


def built_in() -> Catalog:
    """The SageMaker training instances that ship with offload."""
    text = resources.files(__name__).joinpath(BUILT_IN).read_text(encoding="utf-8")
    return Catalog.from_toml(text, source=f"the built-in catalog {BUILT_IN}")


def load_catalog(path: Path | None) -> Catalog:
    """The built-in catalog, extended by a file's types, which replace built-in types of the same name.

    Raises ConfigError if the file cannot be read or does not hold a catalog.
    """
    if path is None:
        return built_in()
    return built_in().extended_by(Catalog.from_toml(read_text(path, "the catalog"), source=str(path)))


def refreshed(catalog: Catalog, region: str, *, names: list[str], client: Any = None) -> Catalog:
    """The catalog with AWS's current on-demand training prices in ``region`` for these types.

    ``client`` is a boto3 client of the service "pricing"; one is made from the environment's credentials by default.
    Raises ConfigError if boto3 or credentials are missing, or a type is not offered there.
    """
    client = client or _pricing_client()
    prices = {name: _training_price(client, region, name) for name in names}
    return catalog.with_prices(prices, region=region, source="AWS price list API")


def _pricing_client() -> Any:
    try:
        import boto3
    except ImportError:
        raise ConfigError("refreshing prices needs boto3: pip install 'offload[sagemaker]'.") from None
    try:
        return boto3.Session().client("pricing", region_name=PRICE_API_REGION)
    except Exception as error:  # AWS_PROFILE names no profile, or a file of settings is damaged
        raise _no_answer(error) from None


def _training_price(client: Any, region: str, name: str) -> float:
    wanted = {"regionCode": region, "instanceName": name, "component": "Training"}
    filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in wanted.items()]
    try:
        listed = client.get_products(ServiceCode="AmazonSageMaker", Filters=filters)["PriceList"]
    except Exception as error:  # botocore makes its classes at run time, and raises others without credentials
        raise _no_answer(error) from None
    for product in listed:
        terms = json.loads(product) if isinstance(product, str) else product
        for term in terms["terms"].get("OnDemand", {}).values():
            for dimension in term["priceDimensions"].values():
                if float(dimension["pricePerUnit"]["USD"]) > 0:
                    return float(dimension["pricePerUnit"]["USD"])
    raise ConfigError(
        f"AWS's price list has no on-demand training price of {name} in {region}. Name a region in which SageMaker has it, or plan with "
        "the catalog's prices."
    )


def _no_answer(error: Exception) -> ConfigError:
    return ConfigError(
        f"AWS's price list cannot be queried ({type(error).__name__}: {error}). Set credentials that allow pricing:GetProducts, or plan "
        "with the catalog's prices."
    )
