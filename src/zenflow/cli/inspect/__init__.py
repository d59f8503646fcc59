"""``zenflow inspect``: whether a run's gradients suit ZenFlow, from its selection log."""
