"""The Hugging Face Trainer. Two arguments belong to ZenFlow: the optimizer, and a callback.

The callback applies every gradient before each evaluation and save. TRL's trainers take the same two.
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from zenflow import ZenFlowAdamW
from zenflow.integrations.transformers import ZenFlowCallback


def make_model() -> LlamaForCausalLM:
    """A language model of random weights; yours comes from ``from_pretrained``."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def make_rows(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Sequences that count upwards, from random starts."""
    starts = torch.randint(32, (count,), generator=torch.Generator().manual_seed(seed))
    rows = [((start + torch.arange(16)) % 32).tolist() for start in starts]
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=make_model(),
            args=TrainingArguments(
                output_dir=folder,
                max_steps=60,
                per_device_train_batch_size=8,
                gradient_accumulation_steps=2,
                lr_scheduler_type="cosine",
                warmup_steps=5,
                max_grad_norm=1.0,
                eval_strategy="steps",
                eval_steps=20,
                save_strategy="steps",
                save_steps=20,
                save_total_limit=2,
                load_best_model_at_end=True,
                use_cpu=True,
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=make_rows(400, seed=0),
            eval_dataset=make_rows(40, seed=1),
            # without the next line, Trainer takes torch's AdamW
            optimizer_cls_and_kwargs=(ZenFlowAdamW, {"lr": 3e-3, "config": {"topk_ratio": 0.1}}),
            callbacks=[ZenFlowCallback()],
        )
        print(f"before: {trainer.evaluate()['eval_loss']:.4f}")
        trainer.train()  # or trainer.train(resume_from_checkpoint=True)
        print(f"best: {trainer.evaluate()['eval_loss']:.4f}")
        trainer.save_model()


if __name__ == "__main__":
    main()
