"""Text that is on every machine with Python: documentation to pretrain on, source code to learn."""

import ast
import hashlib
import sysconfig
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from pathlib import Path

import torch
from torch import Tensor

_SOURCE_BYTES = 3_000_000
_HELDOUT_EVERY = 10
_END = "<|endoftext|>"


def documentation() -> list[str]:
    """The language reference, docstrings, and what installed distributions say of themselves."""
    from pydoc_data.topics import topics

    texts = [topics[name] for name in sorted(topics)]
    for path in _modules():
        texts.extend(_docstrings(path))
    seen = set()
    for name, text in sorted(_descriptions()):
        if name not in seen:
            seen.add(name)
            texts.append(text)
    return texts


def source_code() -> list[str]:
    """Modules of the standard library without their docstrings, about 3 MB, in an order that is
    nobody's."""
    by_chance = sorted(_modules(), key=lambda path: hashlib.sha256(path.name.encode()).digest())
    texts, size = [], 0
    for path in by_chance:
        text = _without_docstrings(path)
        if text is None:
            continue
        texts.append(text)
        size += len(text)
        if size > _SOURCE_BYTES:
            break
    return texts


def tokens(kind: str, cache: Path) -> tuple[Tensor, Tensor]:
    """Token ids to train on and held out, int64: ``"documentation"``, ``"source"``, ``"bytes"`` (of
    the documentation)."""
    train, heldout = torch.load(cache / f"{kind}.pt")
    return train, heldout


def prepare_tokens(cache: Path, vocab: int) -> None:
    """Train the tokenizer and leave both texts as token ids in ``cache``."""
    from tokenizers import ByteLevelBPETokenizer

    if (cache / "source.pt").exists():
        return
    cache.mkdir(parents=True, exist_ok=True)
    texts = {"documentation": documentation(), "source": source_code()}
    _save("bytes", texts["documentation"], lambda part: [*part.encode(), 0], cache)
    bpe = ByteLevelBPETokenizer()
    both = [*texts["documentation"], *texts["source"]]
    bpe.train_from_iterator(
        both, vocab, min_frequency=2, show_progress=False, special_tokens=[_END]
    )
    end = bpe.token_to_id(_END)
    for kind, parts in texts.items():
        _save(kind, parts, lambda part: [*bpe.encode(part).ids, end], cache)


def _save(kind: str, parts: list[str], encode: Callable[[str], list[int]], cache: Path) -> None:
    halves = ([], [])
    for i, part in enumerate(parts):
        halves[i % _HELDOUT_EVERY == 0].extend(encode(part))
    torch.save([torch.tensor(half) for half in halves], cache / f"{kind}.pt")


def _modules() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "idlelib", "turtledemo", "pydoc_data", "encodings"}
    return [
        path
        for path in sorted(root.rglob("*.py"))
        if skipped.isdisjoint(path.relative_to(root).parts)
    ]


def _parsed(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return None  # lib2to3's test data and the like


def _documented(tree: ast.Module) -> Iterator[ast.AST]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return (node for node in ast.walk(tree) if isinstance(node, kinds))


def _docstrings(path: Path) -> Iterator[str]:
    tree = _parsed(path)
    for node in _documented(tree) if tree else ():
        text = ast.get_docstring(node)
        if text and len(text) > 200:
            yield text


def _without_docstrings(path: Path) -> str | None:
    tree = _parsed(path)
    if tree is None:
        return None
    lines = path.read_text(encoding="utf-8").splitlines()
    for node in _documented(tree):
        if ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            for number in range(first.lineno - 1, first.end_lineno):
                lines[number] = ""
    return "\n".join(line for line in lines if line.strip())


def _descriptions() -> Iterator[tuple[str, str]]:
    for distribution in distributions():
        text = distribution.metadata.get_payload() if distribution.metadata else None
        if isinstance(text, str) and len(text) > 1000:
            yield distribution.metadata["Name"], text
