"""Speech: long waveforms of different lengths, padded in collate_fn. Batches are random: the Trainer has no batch samplers."""

import torch

import offload


class Waveforms:
    """Tones between a tenth of a second and a second long."""

    def __len__(self):
        return 40

    def length(self, i):
        return 1600 + 360 * (i * 17 % 40)

    def __getitem__(self, i):
        pitch = i % 4
        return torch.sin(torch.arange(self.length(i)) * (0.05 + 0.05 * pitch)), pitch


def collate(samples):
    waves, pitches = zip(*samples, strict=True)
    lengths = torch.tensor([len(wave) for wave in waves])
    return torch.nn.utils.rnn.pad_sequence(waves, batch_first=True), lengths, torch.tensor(pitches)


def train(ctx):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv1d(1, 8, 64, 16), torch.nn.ReLU(), torch.nn.Conv1d(8, 4, 9, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer = ctx.prepare(model, optimizer)
    for _ in ctx.epochs(2):
        for waves, lengths, pitches in ctx.batches("train"):
            frames = model(waves.unsqueeze(1))
            valid = torch.arange(frames.shape[-1], device=frames.device) < (lengths // 64).unsqueeze(1).clamp(min=1)
            scores = (frames * valid.unsqueeze(1)).sum(-1) / valid.sum(-1, keepdim=True)
            loss = torch.nn.functional.cross_entropy(scores, pitches)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ctx.report(loss=loss)


def build():
    data = offload.from_torch(Waveforms(), collate_fn=collate)
    return offload.Trainer(train, datasets={"train": data}, batch_size=5)


if __name__ == "__main__":
    build().fit()
