"""Arithmetic on raw tensors: the torch reference, and later its native twins."""
