"""Speech: long waveforms of different lengths, in buckets of similar length by a batch sampler."""

import torch
from torch.utils.data import DataLoader


class Waveforms:
    """Tones between a tenth of a second and a second long."""

    def __len__(self):
        return 40

    def length(self, i):
        return 1600 + 360 * (i * 17 % 40)

    def __getitem__(self, i):
        pitch = i % 4
        return torch.sin(torch.arange(self.length(i)) * (0.05 + 0.05 * pitch)), pitch


class Buckets:
    """Batches of waveforms of similar length, in random order."""

    def __init__(self, dataset, batch_size):
        order = sorted(range(len(dataset)), key=dataset.length)
        self.batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        for i in torch.randperm(len(self.batches)).tolist():
            yield self.batches[i]


def collate(samples):
    waves, pitches = zip(*samples, strict=True)
    lengths = torch.tensor([len(wave) for wave in waves])
    return torch.nn.utils.rnn.pad_sequence(waves, batch_first=True), lengths, torch.tensor(pitches)


def main():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv1d(1, 8, 64, 16), torch.nn.ReLU(), torch.nn.Conv1d(8, 4, 9, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    dataset = Waveforms()
    loader = DataLoader(dataset, batch_sampler=Buckets(dataset, 5), collate_fn=collate)
    losses = []
    for _ in range(2):
        for waves, lengths, pitches in loader:
            frames = model(waves.unsqueeze(1))
            valid = torch.arange(frames.shape[-1], device=frames.device) < (lengths // 64).unsqueeze(1).clamp(min=1)
            scores = (frames * valid.unsqueeze(1)).sum(-1) / valid.sum(-1, keepdim=True)
            loss = torch.nn.functional.cross_entropy(scores, pitches)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(main())
