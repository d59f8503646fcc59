"""``zenflow doctor``: what this machine offers, what is in use, and what would make it faster."""
