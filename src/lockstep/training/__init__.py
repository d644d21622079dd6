"""One optimizer step, in its parts: forwards, accumulation, the exchange and the update; and trials and scores."""
