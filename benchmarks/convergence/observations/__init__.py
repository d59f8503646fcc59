"""The paper's observations, looked for in the tasks: skew, stability, fidelity, theory."""
