"""A real language model with random weights and one batch of random tokens."""

import importlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

VOCABULARY = 8192


class LanguageModel(nn.Module):
    """A Llama whose forward gives the loss alone."""

    def __init__(self, *, hidden: int, layers: int, tokens: int) -> None:
        super().__init__()
        transformers = importlib.import_module("transformers")
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=hidden * 11 // 4 // 8 * 8,
            num_hidden_layers=layers,
            num_attention_heads=max(1, hidden // 64),
            num_key_value_heads=max(1, hidden // 128),
            max_position_embeddings=max(64, tokens),
            tie_word_embeddings=True,
            use_cache=False,
        )
        torch.manual_seed(0)
        self.model: nn.Module = transformers.LlamaForCausalLM(config).bfloat16()

    def forward(self, ids: Tensor) -> Tensor:
        """The loss of predicting the next tokens."""
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss


def make_llama(*, hidden: int, layers: int, tokens: int) -> tuple[LanguageModel, Sequence[Tensor]]:
    """The model and one sequence of so many tokens."""
    model = LanguageModel(hidden=hidden, layers=layers, tokens=tokens)
    return model, (torch.randint(VOCABULARY, (1, tokens)),)
