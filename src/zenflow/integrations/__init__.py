"""ZenFlow inside other training libraries, one module each. Nothing in zenflow's core needs them."""
