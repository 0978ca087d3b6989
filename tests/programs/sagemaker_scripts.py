"""Users' scripts that tests launch on emulated hosts: they travel in the bundle and know nothing of the tests."""

COUNTS = '''
"""Counts which host preprocessed how many samples, and waits until every host has."""
import argparse, os, socket, time
from pathlib import Path
import numpy as np, ray.train, torch
import offload

class Samples(torch.utils.data.Dataset):
    def __init__(self, shared, hosts, samples):
        self.shared, self.hosts, self.samples = Path(shared), hosts, samples

    def __len__(self):
        return self.samples

    def __getitem__(self, i):
        name = socket.gethostname()
        (self.shared / f"preprocesses-{name}").touch()
        while len(list(self.shared.glob("preprocesses-*"))) < self.hosts:
            time.sleep(0.05)
        return {"x": np.full(2, i, dtype=np.float32), "host": np.int64(name.rpartition("-")[2])}

def train(ctx):
    model = torch.nn.Linear(2, 1)
    model, _ = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    args, counts = ctx.config["args"], np.zeros(8)
    for _ in ctx.epochs(args.epochs):
        for batch in ctx.batches("train"):
            if args.name:
                with open(f"{args.shared}/trained-{args.name}-{ctx.rank}-{os.getpid()}", "a") as file:
                    print(*(int(each) for each in batch["sample_id"]), file=file)
            counts += np.bincount(np.asarray(batch["host"]), minlength=8)
            loss = model(batch["x"]).square().mean()
            ctx.backward(loss)
            ctx.step()
            act(ctx, args)
    ctx.report(
        loss=float(loss),
        workers=ctx.sum(1),
        over_eth0=ctx.sum(os.environ.get("GLOO_SOCKET_IFNAME") == os.environ.get("NCCL_SOCKET_IFNAME") == "eth0"),
        worker_hosts=ctx.sum(10 ** int(socket.gethostname().rpartition("-")[2])),
        **{f"host_{n}": ctx.sum(count) for n, count in enumerate(counts) if n},
    )

def act(ctx, args):
    """What a test wants to happen in mid-run."""
    shared, step = Path(args.shared), ctx.global_step
    if args.what == "raise" and step == 3:
        raise ValueError("the third step is cursed")
    if args.what in ("slow", "slower"):
        time.sleep(0.02 if args.what == "slow" else 0.2)
    if args.what == "wait" and step >= 3:
        (shared / "waits").touch()
        while not (shared / "go").exists() and not (shared / "one-more").exists():
            time.sleep(0.05)
        (shared / "one-more").unlink(missing_ok=True)

def build():
    parser = argparse.ArgumentParser()
    parser.add_argument("--shared", required=True)
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--what", default="")
    parser.add_argument("--name", default="")
    parser.add_argument("--note", default="")
    args = parser.parse_args()
    print("here are the parameters:", args.samples, args.note, flush=True)
    return offload.Trainer(
        train,
        datasets={"train": offload.from_torch(Samples(args.shared, args.hosts, args.samples))},
        workers=args.workers,
        batch_size=20,
        checkpoints=offload.Checkpoints(every_s=1.0, every_epochs=100),
        scaling_config=ray.train.ScalingConfig(
            resources_per_worker={"CPU": 0.5, "group_gpu": 0.6}, placement_strategy="SPREAD"
        ),
        train_loop_config={"args": args},
    )
'''
