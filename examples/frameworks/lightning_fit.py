"""Lightning: fit() takes offload.DataLoader as it takes torch's, and its checkpoints resume the loader in the middle of an epoch.

python examples/frameworks/lightning_fit.py        # needs `pip install lightning`
"""

import lightning
import torch

import offload


class Digits(torch.utils.data.Dataset):
    """Noisy patterns in four classes."""

    def __len__(self):
        return 256

    def __getitem__(self, i):
        noise = torch.rand(64, generator=torch.Generator().manual_seed(i))
        noise[16 * (i % 4) : 16 * (i % 4 + 1)] += 1
        return noise, i % 4


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 4)
        self.losses = []

    def training_step(self, batch):
        features, labels = batch
        loss = torch.nn.functional.cross_entropy(self.layer(features), labels)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main(loader_class=offload.DataLoader, folder="runs/lightning", **trainer_arguments):
    lightning.seed_everything(0)
    model = Classifier()
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="auto",
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        **trainer_arguments,
    )
    trainer.fit(model, loader_class(Digits(), batch_size=16, shuffle=True))
    return model.losses


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f} in {len(losses)} steps")
