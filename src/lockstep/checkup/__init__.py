"""`lockstep doctor` and `lockstep bench`: what they do on the nodes."""
