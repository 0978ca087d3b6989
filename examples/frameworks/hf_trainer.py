"""Hugging Face Trainer: a subclass of five lines takes its batches from offload.DataLoader.

python examples/frameworks/hf_trainer.py        # needs `pip install transformers accelerate`
"""

import torch
import transformers

import offload


class OffloadTrainer(transformers.Trainer):
    """The Trainer, with the training batches made on every CPU of the cluster."""

    def get_train_dataloader(self):
        return offload.DataLoader(
            self.train_dataset, self._train_batch_size, sampler=self._get_train_sampler(), collate_fn=self.data_collator
        )


class Sentences(torch.utils.data.Dataset):
    """Token sequences of different lengths; the label says whether token 3 occurs."""

    def __len__(self):
        return 64

    def __getitem__(self, i):
        tokens = [1 + (i * k) % 7 for k in range(1, 4 + i % 5)]
        return {"input_ids": tokens, "labels": int(3 in tokens)}


def pad(samples):
    longest = max(len(sample["input_ids"]) for sample in samples)
    tokens = torch.zeros(len(samples), longest, dtype=torch.long)
    for row, sample in enumerate(samples):
        tokens[row, : len(sample["input_ids"])] = torch.tensor(sample["input_ids"])
    labels = torch.tensor([sample["labels"] for sample in samples])
    return {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "labels": labels}


def main(trainer_class=OffloadTrainer, folder="runs/hf"):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    settings = transformers.TrainingArguments(
        folder, num_train_epochs=2, per_device_train_batch_size=8, logging_steps=1, save_strategy="no", report_to=[],
        disable_tqdm=True, seed=0, use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = trainer_class(
        transformers.BertForSequenceClassification(config), settings, train_dataset=Sentences(), data_collator=pad
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f} in {len(losses)} steps")
