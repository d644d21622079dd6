"""The parts of an optimizer step that know nothing of layouts: gradient norm, optimizer, rates, precision, scores."""
