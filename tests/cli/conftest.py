"""A tiny model directory and a way to run the command, for the tests of ``zenflow finetune``."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from finetune_helpers import TEXT, Cli, Result


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models as small as these are faster with one thread, however busy the machine is."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Cli:
    """Runs the command in this process, so that the libraries are imported once."""
    from zenflow.cli.main import main

    def run(*arguments: object) -> Result:
        capfd.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        captured = capfd.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 of 30 thousand weights with its tokenizer, which has a chat template."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from zenflow.cli.finetune.builtin import train_tokenizer

    path = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer = train_tokenizer([TEXT])
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def small(tiny_model: Path, text_file: Path) -> list[object]:
    """Arguments of a run that takes a second."""
    return [
        *("finetune", "--model", tiny_model, "--data", text_file, "--max-length", 32),
        *("--batch-size", 4, "--lr", 1e-2, "--log-every", 2, "--device", "cpu"),
    ]
