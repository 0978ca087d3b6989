"""A GAN: two models, two optimizers, two backward passes for each batch."""

import torch
from torch.utils.data import DataLoader

import offload


class Rings:
    """Points on a ring."""

    def __len__(self):
        return 64

    def __getitem__(self, i):
        angle = torch.tensor(i * 0.7)
        return torch.stack([angle.cos(), angle.sin()])


def train(ctx):
    torch.manual_seed(0)
    generator = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    judge = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    generates = torch.optim.Adam(generator.parameters(), lr=1e-3)
    judges = torch.optim.Adam(judge.parameters(), lr=1e-3)
    right = torch.nn.functional.binary_cross_entropy_with_logits
    generator, judge, generates, judges = ctx.prepare(generator, judge, generates, judges)
    noise = torch.Generator().manual_seed(1)
    for _ in ctx.epochs(2):
        for real in ctx.batches("train"):
            fake = generator(torch.randn(len(real), 4, generator=noise).to(real.device))
            judged = judge(torch.cat([real, fake.detach()]))
            loss = right(judged, torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)]).to(real.device))
            judges.zero_grad()
            loss.backward()
            judges.step()
            fooled = right(judge(fake), torch.ones(len(real), 1, device=real.device))
            generates.zero_grad()
            fooled.backward()
            generates.step()
            ctx.report(loss=loss, loss_of_generator=fooled)


def build():
    loader = DataLoader(Rings(), batch_size=16, shuffle=True, drop_last=True)
    return offload.Trainer(train, datasets={"train": loader})


if __name__ == "__main__":
    build().fit()
