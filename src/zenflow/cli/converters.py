"""Converters for argparse that say what is legal when they refuse."""

import argparse
from collections.abc import Callable
from typing import Any


def integer(low: int, *, auto: bool = False) -> Callable[[str], Any]:
    """A converter for argparse: an integer of at least `low`, or "auto" where that is legal."""
    legal = f"an integer >= {low}" + (' or "auto"' if auto else "")

    def convert(text: str) -> int | str:
        if auto and text == "auto":
            return text
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not {legal}")
        return value

    return convert


def number(low: float, high: float, *, ends: bool = True) -> Callable[[str], float]:
    """A converter for argparse: a finite number from `low` to `high`, the ends included or not."""
    legal = f"a number {'>=' if ends else '>'} {low:g}"
    if high != float("inf"):
        legal += f" and {'<=' if ends else '<'} {high:g}"

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        inside = low <= value <= high if ends else low < value < high
        if not inside or value == float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} is not {legal}")
        return value

    return convert


def numbers(convert: Callable[[str], Any], *, unit: str = "numbers") -> Callable[[str], list[Any]]:
    """A converter for argparse: values separated by commas, each converted by `convert`."""

    def convert_all(text: str) -> list[Any]:
        parts = [part.strip() for part in text.split(",")]
        if not all(parts):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of {unit} such as 1,2")
        return [convert(part) for part in parts]

    return convert_all
