"""Hugging Face Trainer: a subclass takes its batches from offload.DataLoader, on any number of ranks.

python examples/frameworks/hf_trainer.py        # needs `pip install transformers accelerate`
"""

import torch
import transformers
from torch.utils.data import DistributedSampler

import offload


class SetEpoch(transformers.TrainerCallback):
    """Tells the sampler the epoch, also where the Trainer resumes: it then skips the samples that it has trained on."""

    def on_epoch_begin(self, args, state, control, train_dataloader, **others):
        train_dataloader.sampler.set_epoch(int(state.epoch))


class OffloadTrainer(transformers.Trainer):
    """The Trainer, with the training batches made on every CPU of the cluster."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.add_callback(SetEpoch())

    def get_train_dataloader(self, loader_class=offload.DataLoader):
        return loader_class(
            self.train_dataset,
            self._train_batch_size,
            sampler=DistributedSampler(
                self.train_dataset, self.args.world_size, self.args.process_index, seed=self.args.seed
            ),
            collate_fn=self._get_collator_with_removed_columns(self.data_collator, "training"),
            drop_last=self.args.dataloader_drop_last,
        )


class Sentences(torch.utils.data.Dataset):
    """Token sequences of different lengths, and their texts, which the model does not take; the label says whether token 3 occurs."""

    def __len__(self):
        return 64

    def __getitem__(self, i):
        tokens = [1 + (i * k) % 7 for k in range(1, 4 + i % 5)]
        return {"input_ids": tokens, "labels": int(3 in tokens), "text": " ".join(map(str, tokens))}


def pad(samples):
    longest = max(len(sample["input_ids"]) for sample in samples)
    tokens = torch.zeros(len(samples), longest, dtype=torch.long)
    for row, sample in enumerate(samples):
        tokens[row, : len(sample["input_ids"])] = torch.tensor(sample["input_ids"])
    # As data collators of the library do, it takes all columns that are left.
    rest = {name: torch.tensor([sample[name] for sample in samples]) for name in samples[0] if name != "input_ids"}
    return {"input_ids": tokens, "attention_mask": (tokens > 0).long(), **rest}


def main(trainer_class=OffloadTrainer, folder="runs/hf", resume=None, **named):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    settings = transformers.TrainingArguments(
        folder, num_train_epochs=2, per_device_train_batch_size=8, logging_steps=1, report_to=[], disable_tqdm=True,
        seed=0, use_cpu=not torch.cuda.is_available(), **{"save_strategy": "no", **named},
    )  # fmt: skip
    trainer = trainer_class(
        transformers.BertForSequenceClassification(config), settings, train_dataset=Sentences(), data_collator=pad
    )
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f} in {len(losses)} steps")
