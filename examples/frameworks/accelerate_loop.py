"""Accelerate: prepare the model and the optimizer, and give the loader the rank's own sampler.

    accelerate launch examples/frameworks/accelerate_loop.py        # needs `pip install accelerate`

Accelerate would replace a loader that goes through prepare() by one of torch's.
"""

import accelerate
import torch
from torch.utils.data import DistributedSampler

import offload


class Lines(torch.utils.data.Dataset):
    """Points on a line."""

    def __len__(self):
        return 64

    def __getitem__(self, i):
        x = torch.tensor([i / 64])
        return x, 3 * x - 1


def main(loader_class=offload.DataLoader):
    accelerate.utils.set_seed(0)
    accelerator = accelerate.Accelerator()
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sampler = DistributedSampler(Lines(), accelerator.num_processes, accelerator.process_index, seed=0)
    loader = loader_class(Lines(), batch_size=8, sampler=sampler)
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x.to(accelerator.device)), y.to(accelerator.device))
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f} in {len(losses)} steps")
