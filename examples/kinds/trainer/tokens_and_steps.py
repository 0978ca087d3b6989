"""Language modelling: windows of tokens, trained for a number of steps."""

import torch

import offload

TEXT = torch.tensor([(7 * i * i + 3 * i) % 31 for i in range(5000)])
WINDOW, STEPS = 16, 20


def shifted(windows):
    tokens = torch.stack(windows)
    return tokens[:, :-1], tokens[:, 1:]


def train(ctx):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(31, 24), torch.nn.Linear(24, 31))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = ctx.prepare(model, optimizer)
    for tokens, targets in ctx.steps(STEPS):
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.report(loss=loss)


def build():
    data = offload.from_torch(TEXT.unfold(0, WINDOW + 1, 1), collate_fn=shifted)
    return offload.Trainer(train, datasets={"train": data}, batch_size=8)


if __name__ == "__main__":
    build().fit()
