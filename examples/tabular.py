"""Rows of a table, joined with a second one, filtered and normalised on every CPU while a model trains on them.

python examples/tabular.py    # generates two small tables and trains on them; or on your own:
offload run examples/tabular.py --run-dir runs/mine -- DATA    # DATA/visits/*.parquet and DATA/users/*.parquet
"""

import logging
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray.data
import torch
from ray.data.expressions import col
from torch.nn.functional import binary_cross_entropy_with_logits

import offload

FEATURES = ("age", "minutes", "pages")


class Joined:
    """Adds the age of each visit's user. Ray Data's steps may be classes: each preprocessing process constructs its own."""

    def __init__(self, users: pa.Table) -> None:
        self.age = dict(zip(users["user"].to_pylist(), users["age"].to_pylist(), strict=True))

    def __call__(self, batch):
        return {**batch, "age": np.array([self.age[user] for user in batch["user"].tolist()])}


class Normalized:
    """Brings the features to mean 0 and deviation 1."""

    def __init__(self, means: list[float], deviations: list[float]) -> None:
        self.means, self.deviations = np.array(means), np.array(deviations)

    def __call__(self, batch):
        x = np.stack([batch[name] for name in FEATURES], axis=1)
        bought = batch["bought"].astype(np.float32)
        return {"x": ((x - self.means) / self.deviations).astype(np.float32), "bought": bought}


def rows(data: Path) -> ray.data.Dataset:
    """The visits of adults, with their users' age, normalised."""
    visits, users = ray.data.read_parquet(str(data / "visits")), pq.read_table(data / "users")
    sample = {**visits.take_batch(10_000), "age": users["age"].to_numpy()}
    means, deviations = [[float(f(sample[name])) for name in FEATURES] for f in (np.mean, np.std)]
    joined = visits.map_batches(Joined, fn_constructor_args=(users,), concurrency=1)
    adults = joined.filter(expr=col("age") >= 18)
    return adults.map_batches(Normalized, fn_constructor_args=(means, deviations), concurrency=1)


def train(ctx: offload.Context) -> None:
    """Train the model. Each worker calls this once."""
    model = torch.nn.Sequential(torch.nn.Linear(len(FEATURES), 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    model, _optimizer = ctx.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for _epoch in ctx.epochs(3):
        for batch in ctx.batches("train"):
            logits = model(batch["x"])[:, 0]
            loss = binary_cross_entropy_with_logits(logits, batch["bought"])
            ctx.backward(loss)
            ctx.step()
            right = ((logits > 0) == (batch["bought"] > 0.5)).sum()
            ctx.accumulate(rows=len(logits), right=right)
        sums = ctx.accumulated()
        ctx.report(loss=loss, accuracy=sums["right"] / sums["rows"])


def make_tables(data: Path, visits: int = 20_000, users: int = 500) -> Path:
    """Write two tables in which long visits of older users end with a purchase."""
    rng = np.random.default_rng(0)
    age, user = rng.integers(12, 80, users), rng.integers(0, users, visits)
    minutes = rng.gamma(2.0, 5.0, visits)
    bought = minutes * age[user] + rng.normal(0, 50, visits) > 400
    pages = rng.poisson(minutes / 2)
    tables = {
        "users": pa.table({"user": np.arange(users), "age": age}),
        "visits": pa.table({"user": user, "minutes": minutes, "pages": pages, "bought": bought}),
    }
    for name, table in tables.items():
        (data / name).mkdir(parents=True, exist_ok=True)
        pq.write_table(table, data / name / "0.parquet")
    return data


def build() -> offload.Trainer:
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    data = Path(sys.argv[1]) if len(sys.argv) > 1 else make_tables(Path("runs/tabular-data"))
    return offload.Trainer(train, datasets={"train": rows(data.resolve())}, batch_size=256)


if __name__ == "__main__":
    print(build().fit().summary())
