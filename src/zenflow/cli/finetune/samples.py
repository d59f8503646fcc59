"""A short continuation of a prompt, to show before and after what training changed."""

from typing import TYPE_CHECKING, Any

import torch

from zenflow.cli.finetune.rows import Rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_PROMPT_CHARS = 60
_NEW_TOKENS = 48
_REPETITION_PENALTY = 1.3  # greedy decoding of a hardly trained model loops otherwise


def choose_prompt(given: str | None, heldout: Rows, tokenizer: "PreTrainedTokenizerBase") -> str:
    """The prompt given, or the start of a held-out row."""
    if given is not None:
        return given
    row = heldout.rows[0]
    if heldout.form == "text":
        return _first_words(row["text"])
    if heldout.form == "messages":
        messages = row["messages"]
        context = messages[:-1] if len(messages) > 1 else messages
        return _render(context, tokenizer)
    prompt = row["prompt"]
    return _render(prompt, tokenizer) if isinstance(prompt, list) else str(prompt)


@torch.no_grad()
def continue_prompt(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", prompt: str, max_length: int
) -> str:
    """The model's greedy continuation of a prompt, up to 48 tokens; leaves the model's mode."""
    inputs = tokenizer(prompt or tokenizer.eos_token, return_tensors="pt")
    # A prompt as long as the model's window would leave no room for an answer.
    keep = max(1, max_length - _NEW_TOKENS)
    tokens = inputs["input_ids"][:, -keep:].to(model.device)
    training = model.training
    model.eval()
    out = model.generate(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=_NEW_TOKENS,
        do_sample=False,
        repetition_penalty=_REPETITION_PENALTY,
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
    )
    model.train(training)
    return str(tokenizer.decode(out[0, tokens.shape[1] :], skip_special_tokens=True))


def _first_words(text: str) -> str:
    words = " ".join(text.split())
    if len(words) <= _PROMPT_CHARS:
        return words
    return words[:_PROMPT_CHARS].rsplit(" ", 1)[0]


def _render(messages: list[dict[str, Any]], tokenizer: "PreTrainedTokenizerBase") -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
