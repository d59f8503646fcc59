"""The built-in model: a small Qwen2 with random weights and a tokenizer trained on the spot."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_VOCAB_SIZE = 2048
_END, _IM_START, _IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str]) -> "PreTrainedTokenizerBase":
    """A byte-level BPE tokenizer of up to 2,048 tokens, trained on texts; knows ChatML."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        texts,
        vocab_size=_VOCAB_SIZE,
        min_frequency=2,
        show_progress=False,
        special_tokens=[_END, _IM_START, _IM_END],
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, eos_token=_END, pad_token=_END
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def new_model(tokenizer: "PreTrainedTokenizerBase", max_length: int) -> "PreTrainedModel":
    """A Qwen2 model of about 3.5 million random weights for a tokenizer's vocabulary."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max(2048, max_length),
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,  # it is the end token, whose embedding torch would freeze
    )
    return Qwen2ForCausalLM(config)
