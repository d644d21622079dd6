"""From a plain model to the cut one: the order of cutting, initial weights, formats, compile, recompute."""
