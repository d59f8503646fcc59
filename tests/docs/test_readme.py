"""Every block of the README is executed, each kind in its own way.

- ``python``: all blocks in order, in one fresh interpreter and an empty folder.
- ``bash``: each line by its command. ``make`` runs with ``-n`` (the target must exist); ``pip install``
  with ``--dry-run --no-deps`` (the project builds its metadata and states the extra). ``zenflow`` lines
  run in order in one folder that has the model and data they name, with ``--max-steps 2`` added.
- ``diff``: each change by itself: the old lines and then the new ones make an optimizer, and it trains.
- ``text``: the annotated tree; each path in it must exist.

A block of another kind or an unknown command fails, so nothing escapes unread.
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


class Block(NamedTuple):
    language: str
    line: int
    code: str


def blocks(*languages: str) -> list[Block]:
    """Fenced blocks of the README, with the line that each one's code starts at."""
    found, opened = [], None
    for number, line in enumerate(README.splitlines(), start=1):
        if not line.startswith("```"):
            continue
        if opened is None:
            opened = number, line[3:].strip()
        else:
            code = "\n".join(README.splitlines()[opened[0] : number - 1])
            found.append(Block(opened[1], opened[0] + 1, code))
            opened = None
    assert opened is None, f"the block opened in line {opened} is not closed"
    return [block for block in found if not languages or block.language in languages]


def commands() -> list[str]:
    lines = [line for block in blocks("bash") for line in block.code.splitlines()]
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def run(args: list[str], cwd: Path, timeout_s: float = 120) -> str:
    done = subprocess.run(args, cwd=cwd, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{shlex.join(args)}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_no_block_of_an_unknown_kind():
    assert {block.language for block in blocks()} <= {"python", "bash", "diff", "text"}


def test_python_blocks_run_in_order(tmp_path):
    script = "namespace = {'__name__': '__main__'}\n" + "".join(
        f"exec(compile({chr(10) * (block.line - 1) + block.code!r}, 'README.md', 'exec'), namespace)\n"
        for block in blocks("python")
    )
    assert blocks("python")
    run([sys.executable, "-W", "error", "-c", script], cwd=tmp_path)


def changes() -> dict[str, tuple[str, str]]:
    """Old and new code of each change, by the comment above it."""
    (block,) = blocks("diff")
    found: dict[str, tuple[str, str]] = {}
    name = ""
    for line in block.code.splitlines():
        if line.startswith("  # "):
            name = line[4:]
            found[name] = "", ""
        else:
            old, new = found[name]
            assert line[:2] in ("- ", "+ "), line
            code = line[2:] + "\n"
            found[name] = (old + code, new) if line[0] == "-" else (old, new + code)
    return found


CHANGE_HEAD = """
import logging, sys, tempfile
import torch
from torch.optim import AdamW
from zenflow import ZenFlowAdamW

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 20))

def train(optimizer):
    for _ in range(3):
        model(torch.randn(4, 20)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer

def check(optimizer, kind):
    while not isinstance(optimizer, kind):
        optimizer = optimizer.optimizer
    if kind is ZenFlowAdamW:
        assert optimizer.stats.step == 3
        optimizer.close()
"""
LIGHTNING = """
from lightning.pytorch import LightningModule, Trainer
from zenflow.integrations.lightning import ZenFlowLightningCallback

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = model
    def training_step(self, batch, _):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        {code}

trainer = Trainer(
    accelerator="cpu", max_steps=3, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, callbacks=[ZenFlowLightningCallback()])
trainer.fit(Module(), torch.utils.data.DataLoader(list(torch.randn(20, 20)), 4))
check(trainer.optimizers[0], {kind})
"""
TRANSFORMERS = """
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from zenflow.integrations.transformers import ZenFlowCallback

model = LlamaForCausalLM(LlamaConfig(
    vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
    num_attention_heads=2, pad_token_id=0, bos_token_id=None, eos_token_id=None))
rows = [{{"input_ids": list(range(1, 9)), "labels": list(range(1, 9))}}] * 12
common = dict(output_dir=tempfile.mkdtemp(), max_steps=3, use_cpu=True, report_to="none",
    save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False)
{head}
{code}
trainer.train()
check(trainer.optimizer, {kind})
"""
SFT = """
import datasets, functools, trl
from zenflow.cli.finetune.builtin import train_tokenizer
rows = datasets.Dataset.from_list(rows)
args = trl.SFTConfig(**common, bf16=False, max_length=8)
tokenizer = train_tokenizer(["a few words"])
SFTTrainer = functools.partial(trl.SFTTrainer, processing_class=tokenizer)
"""
CHANGES = {
    "plain PyTorch": "{code}check(train(optimizer), {kind})",
    "Accelerate": (
        "from accelerate import Accelerator\naccelerator = Accelerator(cpu=True)\n"
        "{code}check(train(optimizer), {kind})"
    ),
    "Fabric": (
        "from lightning.fabric import Fabric\nfabric = Fabric(accelerator='cpu', devices=1)\n"
        "{code}check(train(optimizer), {kind})"
    ),
    "Lightning": LIGHTNING,
    "Hugging Face Trainer": TRANSFORMERS.replace("{head}", "args = TrainingArguments(**common)"),
    "TRL": TRANSFORMERS.replace("{head}", SFT),
}


def test_every_change(tmp_path):
    """In one interpreter, since what is slow is to import the trainers."""
    assert changes().keys() == CHANGES.keys()
    scripts = {
        (name, kind): CHANGE_HEAD + CHANGES[name].format(code=code, kind=kind)
        for name, (old, new) in changes().items()
        for code, kind in ((old, "AdamW"), (new, "ZenFlowAdamW"))
    }
    runner = (
        "for name, script in {scripts!r}.items(): exec(compile(script, str(name), 'exec'), {{}})"
    )
    run([sys.executable, "-c", runner.format(scripts=scripts)], cwd=tmp_path, timeout_s=300)


@pytest.mark.parametrize("command", [c for c in commands() if not c.startswith("zenflow ")])
def test_command(command):
    program, *args = shlex.split(command, comments=True)
    match program, args:
        case "make", [target]:
            phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.M)
            assert target in phony[1].split()
            assert run(["make", "-n", target], cwd=ROOT)
        case "pip", ["install", *rest]:
            pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps"]
            assert "Would install torch-zenflow" in run(
                [*pip, "--no-build-isolation", *rest], cwd=ROOT
            )
            pyproject = (ROOT / "pyproject.toml").read_text("utf-8")
            for extra in re.findall(r"[\w-]+", "".join(re.findall(r"\[(.*)\]", rest[-1]))):
                assert re.search(rf"^{extra} = \[", pyproject, re.M), extra
        case _:
            pytest.fail(f"no test knows how to execute {command!r}")


@pytest.mark.slow
def test_zenflow_commands(tmp_path):
    lines = [shlex.split(c, comments=True)[1:] for c in commands() if c.startswith("zenflow ")]
    assert lines
    rows = [{"text": f"Film {i} was worth seeing, and seen. " * 20} for i in range(40)]
    (tmp_path / "reviews.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    zenflow = [sys.executable, "-m", "zenflow.cli"]
    short = ["--max-steps", "2", "--batch-size", "2", "--max-length", "32"]
    run([*zenflow, "finetune", *short, "--output", "path/to/model"], cwd=tmp_path, timeout_s=300)
    for line in lines:
        more = short if line[0] == "finetune" else []
        run([*zenflow, *line, *more], cwd=tmp_path, timeout_s=300)
        if "--output" in line:
            output = tmp_path / line[line.index("--output") + 1]
            assert (output / "summary.json").exists()


def test_paths_of_the_tree_exist():
    (tree,) = blocks("text")
    parents: list[str] = []
    for line in tree.code.splitlines():
        indent, name = re.match(r"( *)(\S+)", line).groups()
        parents[len(indent) // 2 :] = [name]
        path = ROOT / "/".join(parents)
        assert path.is_dir() if name.endswith("/") else path.is_file(), line


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target
