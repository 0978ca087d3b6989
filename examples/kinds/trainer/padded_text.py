"""Text: sentences of different lengths, padded to the longest of their batch."""

import torch
from torch.utils.data import DataLoader

import offload

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "that", "the", "dog", "had", "seen", "the", "cat"]
VOCABULARY = {word: number for number, word in enumerate(sorted(set(WORDS)), start=1)}


class Sentences:
    """Sentences with a label: whether they mention the cat."""

    def __len__(self):
        return 60

    def __getitem__(self, i):
        words = [WORDS[(i + k * (1 + i % 3)) % len(WORDS)] for k in range(2 + i % 7)]
        return {"tokens": [VOCABULARY[word] for word in words], "label": int("cat" in words)}


def collate(samples):
    tokens = [torch.tensor(sample["tokens"]) for sample in samples]
    padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    return {"tokens": padded, "mask": padded > 0, "label": torch.tensor([sample["label"] for sample in samples])}


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(len(VOCABULARY) + 1, 16, padding_idx=0)
        self.head = torch.nn.Linear(16, 2)

    def forward(self, tokens, mask):
        mask = mask.unsqueeze(-1)
        return self.head((self.embed(tokens) * mask).sum(1) / mask.sum(1))


def train(ctx):
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer = ctx.prepare(model, optimizer)
    for _ in ctx.epochs(2):
        for batch in ctx.batches("train"):
            label = batch.pop("label")
            loss = torch.nn.functional.cross_entropy(model(**batch), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ctx.report(loss=loss)


def build():
    loader = DataLoader(Sentences(), batch_size=8, shuffle=True, collate_fn=collate)
    return offload.Trainer(train, datasets={"train": loader})


if __name__ == "__main__":
    build().fit()
