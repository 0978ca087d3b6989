"""Ray Train with Ray Data, as both are usually written. `ray_after.py` is the same training with offload.

python examples/migrate/ray_before.py
"""

import numpy as np
import ray.data
import ray.train
import ray.train.torch
import torch


def features(batch):
    x = batch["id"] / 256
    return {"x": x.astype(np.float32), "y": (3 * x - 1).astype(np.float32)}


def train(config):
    model = ray.train.torch.prepare_model(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shard = ray.train.get_dataset_shard("train")
    for _epoch in range(config["epochs"]):
        for batch in shard.iter_torch_batches(batch_size=16):
            loss = torch.nn.functional.mse_loss(model(batch["x"][:, None])[:, 0], batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ray.train.report({"loss": loss.item()})


def main(workers=2, **run_config):
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"epochs": 2},
        datasets={"train": ray.data.range(256).map_batches(features)},
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        run_config=ray.train.RunConfig(**run_config),
    )
    return trainer.fit()


if __name__ == "__main__":
    print(main())
