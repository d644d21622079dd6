"""All ways to run a training on a machine, and the best of them."""
