"""Claim: RLlib takes a torch module of the user's own.

The claim is that of *Getting Started with Distributed Machine Learning with PyTorch and Ray* (2021). Here the module's
offline data comes through a Ray Dataset: rows of Parquet with frames as PNG, which ``see`` decodes on all CPUs. RLlib's behaviour cloning
trains the module on it. ``offload.Trainer`` trains the same module on the same rows with the same function. So nobody writes the
preprocessing twice:

    python examples/articles/rllib_offline.py                           # records 60 games, clones with both, plays
    python examples/articles/rllib_offline.py --episodes 5000 --iterations 2000 --epochs 20

The game: a ball falls from the top of the picture, and a paddle at the bottom has to be below it at the end.

Measured (``--iterations 200 --epochs 15``, two busy cores, one run): untrained, the module catches 14 % of the balls. Cloned by RLlib it
catches 81 %, and cloned by ``offload.Trainer`` 82 %. With a learning rate of 0.002 it needs twice the steps. A test shows that ``see``
returns what the player saw, bit for bit.
"""

import argparse
import io
from pathlib import Path

import gymnasium
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray.data
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy

import offload

SIDE, SEEN, STEPS = 64, 16, 15  # pixels of a recorded frame and of what the module sees; steps of an episode


def look(frame: np.ndarray) -> np.ndarray:
    """A frame (64, 64) uint8 as the module sees it: (1, 16, 16) float32 in 0..1."""
    small = frame.reshape(SEEN, SIDE // SEEN, SEEN, SIDE // SEEN).max((1, 3))
    return (small[None] / 255).astype(np.float32)


def see(batch):
    """Recorded rows as training rows. Runs wherever there is a CPU."""
    frames = [np.asarray(Image.open(io.BytesIO(png))) for png in batch["png"]]
    return {
        **{name: batch[name] for name in batch if name != "png"},
        "obs": np.stack([look(frame) for frame in frames]),
    }


class Catch(gymnasium.Env):
    """Catch the ball: actions move the paddle by a cell to the left, not at all, or to the right."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (1, SEEN, SEEN), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, config=None) -> None:
        self.frame = np.zeros((SIDE, SIDE), np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.ball, self.paddle = self.np_random.integers(0, SEEN, 2)
        self.row = 0
        return self._looked(), {}

    def step(self, action):
        self.paddle = int(np.clip(self.paddle + int(action) - 1, 0, SEEN - 1))
        self.row += 1
        over = self.row == STEPS
        return self._looked(), float(over and abs(self.paddle - self.ball) <= 1), over, False, {}

    def _looked(self) -> np.ndarray:
        cell = SIDE // SEEN
        self.frame[:] = 0
        self.frame[self.row * cell : (self.row + 1) * cell, self.ball * cell : (self.ball + 1) * cell] = 255
        self.frame[-cell:, self.paddle * cell : (self.paddle + 1) * cell] = 128
        return look(self.frame)


def record(folder: Path, episodes: int) -> Path:
    """Write what a good player saw and did, a row for each step."""
    game, rows = Catch(), []
    for episode in range(episodes):
        game.reset(seed=episode)
        over = False
        while not over:
            png = io.BytesIO()
            Image.fromarray(game.frame).save(png, "PNG")
            action = int(np.sign(game.ball - game.paddle)) + 1
            _, reward, over, _, _ = game.step(action)
            rows.append({"png": png.getvalue(), "actions": action, "rewards": reward, "terminateds": over})
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "0.parquet")
    return folder


class Policy(nn.Sequential):
    """From frames (N, 1, 16, 16) to the logits of the actions (N, 3)."""

    def __init__(self) -> None:
        convolutions = (nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU())
        super().__init__(*convolutions, nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 3))


def algorithm(folder: Path, batch_size: int, lr: float):
    """RLlib's behaviour cloning of the policy. It alone imports RLlib: processes that only preprocess need none of it."""
    from ray.rllib.algorithms.bc import BCConfig
    from ray.rllib.core.columns import Columns
    from ray.rllib.core.rl_module.rl_module import RLModuleSpec
    from ray.rllib.core.rl_module.torch import TorchRLModule
    from ray.rllib.offline.offline_data import OfflineData

    class PolicyModule(TorchRLModule):
        """The policy as a module of RLlib."""

        def setup(self) -> None:
            self.policy = Policy()

        def _forward(self, batch, **kwargs):
            return {Columns.ACTION_DIST_INPUTS: self.policy(batch[Columns.OBS])}

    class SeenData(OfflineData):
        """RLlib's offline data, with ``see`` between the files and RLlib's own steps."""

        def __init__(self, config) -> None:
            super().__init__(config)
            self.data = self.data.map_batches(see)

    config = BCConfig().environment(observation_space=Catch.observation_space, action_space=Catch.action_space)
    config = config.training(lr=lr, train_batch_size_per_learner=batch_size)
    config = config.rl_module(rl_module_spec=RLModuleSpec(module_class=PolicyModule))
    return config.offline_data(
        input_=[str(folder)],
        offline_data_class=SeenData,
        ignore_final_observation=True,
        dataset_num_iters_per_learner=1,
        map_batches_kwargs={"concurrency": 1},
    ).build_algo()


def train(ctx: offload.Context) -> None:
    """The same with offload."""
    model = Policy()
    model, _ = ctx.prepare(model, torch.optim.Adam(model.parameters(), lr=ctx.config["lr"]))
    for _epoch in ctx.epochs(ctx.config["epochs"]):
        for batch in ctx.batches("train"):
            loss = cross_entropy(model(batch["obs"]), batch["actions"])
            ctx.backward(loss)
            ctx.step()
        ctx.report(loss=loss)


def trainer(folder: Path, batch_size: int, lr: float, epochs: int) -> offload.Trainer:
    rows = offload.from_ray(ray.data.read_parquet(str(folder)), see)
    settings = {"lr": lr, "epochs": epochs}
    return offload.Trainer(train, datasets={"train": rows}, batch_size=batch_size, train_loop_config=settings)


@torch.no_grad()
def caught(policy: Policy, games: int = 100) -> float:
    """The share of balls that the policy catches."""
    game, total = Catch(), 0.0
    for seed in range(10_000, 10_000 + games):
        (seen, _), over = game.reset(seed=seed), False
        while not over:
            seen, reward, over, _, _ = game.step(int(policy(torch.from_numpy(seen)[None]).argmax()))
            total += reward
    return total / games


def policy_of(algo) -> Policy:
    """The policy that RLlib trains."""
    policy = Policy()
    (weights,) = algo.learner_group.get_weights().values()
    policy.load_state_dict({name.removeprefix("policy."): torch.as_tensor(value) for name, value in weights.items()})
    return policy


def main() -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("runs/articles-data/catch"))
    parser.add_argument("--episodes", type=int, default=60, help="to record")
    parser.add_argument("--iterations", type=int, default=300, help="of RLlib, a batch each")
    parser.add_argument("--epochs", type=int, default=20, help="of offload")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=5e-3)
    args = parser.parse_args()
    ray.init(ignore_reinit_error=True, include_dashboard=False)
    folder = record(args.data.resolve(), args.episodes)
    algo = algorithm(folder, args.batch_size, args.lr)
    shares = {"untrained": caught(policy_of(algo))}
    for _ in range(args.iterations):
        algo.train()
    shares["cloned by RLlib"] = caught(policy_of(algo))
    algo.stop()
    print(f"untrained: catches {shares['untrained']:.0%}, cloned by RLlib: {shares['cloned by RLlib']:.0%}")
    result = trainer(folder, args.batch_size, args.lr, args.epochs).fit(run_dir="runs/rllib_offline", overwrite=True)
    policy = Policy()
    policy.load_state_dict(torch.load(f"{result.checkpoint}/model.pt", weights_only=True))
    shares["cloned by offload.Trainer"] = caught(policy)
    print(f"cloned by offload.Trainer: {shares['cloned by offload.Trainer']:.0%}")
    return shares


if __name__ == "__main__":
    main()
