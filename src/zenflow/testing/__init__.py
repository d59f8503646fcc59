"""For tests, ours and yours: the oracle, and a simulated machine with late copies."""
