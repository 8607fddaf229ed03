"""The demonstration: a pendulum on a cart, swung up and balanced at 1 kHz by a small network that taktd runs."""
