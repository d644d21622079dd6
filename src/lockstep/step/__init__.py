"""The parts of an optimizer step that know no layout: gradient norm, optimizer, rates, precision, scores."""
